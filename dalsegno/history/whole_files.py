"""The files of a log at rest that were read completely and lacked no record.

To find lost records, the whole log has to be read (`shared.log.nats.missing_records`). As long as no file has
changed since, it need not be read again for a list of requests. Whoever replays, verifies or exports reads it
again in any case. The note lies in the folder of the log's index, which is thrown away with it: an index of
other files could have rows of records that are no longer there.
"""

import contextlib
import os
from pathlib import Path

import msgspec

from dalsegno.history import index_store
from shared.log.nats.store_files import StoreFiles


class _Note(msgspec.Struct, frozen=True):
    stream: str
    marks: list[list[int]]


class WholeFiles:
    """The note in the folder of an index. It cannot be made in a folder that cannot be written."""

    def __init__(self, folder: Path, stream: str) -> None:
        self._path = folder / "whole.json"
        self._stream = stream

    def are(self, files: StoreFiles) -> bool:
        """Tell whether these files were found whole and are unchanged since."""
        try:
            found = msgspec.json.decode(self._path.read_bytes(), type=_Note)
        except (OSError, msgspec.DecodeError):  # there is none, or it is damaged
            return False
        return found == _Note(self._stream, files.marks)

    def note(self, files: StoreFiles) -> None:
        """Note that these files were found whole."""
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            draft = self._path.with_suffix(".new")
            handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with os.fdopen(handle, "wb") as file:
                file.write(msgspec.json.encode(_Note(self._stream, files.marks)))
            draft.replace(self._path)

    def forget(self) -> None:
        """Remove the note, and the index of the files."""
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)
            index_store.discard(self._path.parent)
