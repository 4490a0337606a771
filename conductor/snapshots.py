"""The snapshot file: the conductor's state, so that a start need not read the whole log.

    <data dir>/conductor/snapshot     magic, header, state (`conductor.core.snapshot`), digest of all of it

The file is a cache: the log is the truth, and the file may be deleted at any time. It is used only if it is
intact, belongs to this log and to this decision code (`fold_digest`), and the log still has the same record
at its position. Otherwise it is ignored, and one log line gives the reason. It contains prompts and is
readable only by its user.

Several conductors share the file. The leader writes it: first a draft, then an atomic rename, so that readers
never see a partial file.
"""

import asyncio
import hashlib
import itertools
import logging
import os
import struct
from collections.abc import Callable
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Final

import msgspec

from conductor.core import snapshot
from conductor.core.cluster import Cluster
from models.base import ModelGraph
from shared import faults
from shared.log.port import Log, StoredRecord
from shared.subjects import Subjects

_LOGGER: Final = logging.getLogger(__name__)

FILE: Final = "snapshot"
VERSION: Final = 1
_MAGIC: Final = b"dalsegno snapshot\n"
_LENGTH: Final = struct.Struct("<I")
_DIGEST_BYTES: Final = 32


class _Header(msgspec.Struct, frozen=True, kw_only=True):
    """Identity of the state.

    Attributes:
        created_ns: creation time of the log, which identifies it.
        seq: position of the last folded record; `record` is its digest.
        fold: digest of everything that the fold depends on besides the log.
    """

    version: int
    created_ns: int
    seq: int
    record: bytes
    fold: str


class _UnusableError(ValueError):
    """The reason why a snapshot cannot be used."""


class Snapshots:
    """The snapshot in one folder.

    Attributes:
        path: the file.
    """

    def __init__(self, folder: Path, *, fold_digest: str) -> None:
        self.path = folder / FILE
        self._fold = fold_digest
        self._drafts = itertools.count(1)
        self._has_failed = False

    async def read(
        self, log: Log, graph_of: Callable[[str], ModelGraph], subjects: Subjects
    ) -> Cluster | None:
        """Load the state, if the snapshot can be used on `log`.

        Raises:
            LogUnavailableError: the log does not answer.
        """
        try:
            data = await asyncio.to_thread(self._whole)
            if data is None:
                return None
            header, state = _opened(data)
            await self._check(header, log, subjects)
            return snapshot.load(state, graph_of, subjects)
        except (OSError, ValueError) as error:
            _LOGGER.warning("cannot use the snapshot %s, reading the whole log instead: %s", self.path, error)
            return None

    async def write(self, cluster: Cluster, last: StoredRecord, created_ns: int) -> None:
        """Write the present state. `last` is the record folded last, `created_ns` the log's creation time.

        The state is captured at once and serialised in the background. A failure makes the next start
        slower, and is logged once.
        """
        header = _Header(
            version=VERSION,
            created_ns=created_ns,
            seq=cluster.seq,
            record=_digest(last),
            fold=self._fold,
        )
        parts = [_MAGIC, _packed(header)]
        for piece in snapshot.pieces(cluster):
            parts.append(piece)
            await asyncio.sleep(0)
        try:
            await asyncio.to_thread(self._store, parts)
        except OSError as error:
            if not self._has_failed:
                _LOGGER.warning(
                    "cannot write the snapshot %s: %s; the next start takes longer", self.path, error
                )
            self._has_failed = True

    # ---- the file ------------------------------------------------------------------------------------
    def _whole(self) -> bytes | None:
        """The content of the file after checking its digest; None without a file."""
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return None
        content, digest = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
        if hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest() != digest:
            raise _UnusableError("it is damaged: its last bytes are not its digest")
        return content

    def _store(self, parts: list[bytes]) -> None:
        folder = self.path.parent
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for draft in folder.glob(f".{FILE}.*"):  # left by a conductor that was killed or deposed
            draft.unlink(missing_ok=True)
        draft = folder / f".{FILE}.{os.getpid()}.{next(self._drafts)}"
        total = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        try:
            with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                for part in parts:
                    total.update(part)
                    file.write(part)
                file.write(total.digest())
            faults.reach("conductor.snapshot.writing")
            draft.replace(self.path)
        finally:
            with suppress(OSError):
                draft.unlink(missing_ok=True)

    async def _check(self, header: _Header, log: Log, subjects: Subjects) -> None:
        state = await log.state()
        if header.version != VERSION:
            raise _UnusableError(f"expected format {VERSION}, found {header.version}")
        if header.created_ns != state.created_ns:
            raise _UnusableError("it belongs to another log")
        if header.fold != self._fold:
            raise _UnusableError("it was written by another version or for another model")
        if header.seq > state.last_seq:
            raise _UnusableError(f"its position is {header.seq}, but the log ends at {state.last_seq}")
        if header.seq < state.first_seq - 1:
            raise _UnusableError(f"its position is {header.seq}, but the log begins at {state.first_seq}")
        if header.seq >= state.first_seq:
            await self._check_record(header, log, subjects)

    async def _check_record(self, header: _Header, log: Log, subjects: Subjects) -> None:
        """Check the record at the snapshot's position: a log that lost its end may have grown again."""
        found = log.history(subjects.for_conductor(), header.seq, header.seq)
        async with aclosing(found) as records:
            async for record in records:
                if _digest(record) == header.record:
                    return
        raise _UnusableError(f"the log has another record at its position {header.seq}")


def _opened(content: bytes) -> tuple[_Header, memoryview]:
    """Decode an intact file into header and state."""
    begin = len(_MAGIC) + _LENGTH.size
    if not content.startswith(_MAGIC) or len(content) < begin:
        raise _UnusableError("it is not a snapshot")
    end = begin + _LENGTH.unpack_from(content, len(_MAGIC))[0]
    header = msgspec.msgpack.decode(content[begin:end], type=_Header)
    return header, memoryview(content)[end:]


def _packed(header: _Header) -> bytes:
    packed = msgspec.msgpack.encode(header)
    return _LENGTH.pack(len(packed)) + packed


def _digest(record: StoredRecord) -> bytes:
    total = hashlib.blake2b(record.subject.encode(), digest_size=16)
    total.update(b"\0" + record.data)
    return total.digest()
