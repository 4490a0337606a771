"""The log of a data dir at rest, for a temporary nats-server: its own files, or a copy of them.

A server writes into its folder even when nothing is stored: a lock, a log, an index. So a data dir that this
user cannot write, because it is a read-only copy or another user's, is copied to a temporary folder first. So
is one with files that are cut off or missing: a server would repair them, and with that remove the evidence.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dalsegno.serve.data_dir import DataDir, DataDirError
from shared.log.nats.store_files import StoreFiles


@contextmanager
def store_at_rest(data_dir: DataDir, stream: str) -> Iterator[tuple[Path, StoreFiles]]:
    """Yield a folder with the log, which a server may use, and the files of the log as the data dir has them.

    No deployment starts on the data dir meanwhile.

    Raises:
        DataDirError: it holds no log, or cannot be read or copied, or a deployment uses it.
    """
    if not os.path.lexists(data_dir.nats):
        raise DataDirError(f"{data_dir.path} holds no log: expected a folder {data_dir.nats}")
    is_writable = _is_writable(data_dir)
    with data_dir.lock() if is_writable else _shared_lock(data_dir):
        if is_writable and not (files := StoreFiles(data_dir.nats, stream)).looks_damaged:
            yield data_dir.nats, files
            return
        with tempfile.TemporaryDirectory(prefix="dalsegno-") as folder:
            copy = _copied(data_dir, Path(folder) / "nats")
            yield copy, StoreFiles(data_dir.nats, stream)


def _copied(data_dir: DataDir, copy: Path) -> Path:
    try:
        _copy(data_dir.nats, copy)
    except OSError as error:
        raise DataDirError(
            f"the log of the data dir {data_dir.path} has to be copied to be read, and cannot be: "
            f"{error.filename}: {error.strerror}; set TMPDIR to a folder with enough space, or run as a user "
            "who may read it"
        ) from error
    return copy


def _is_writable(data_dir: DataDir) -> bool:
    """Tell whether a launcher and its server could write everything that they write."""
    own = [data_dir.path, data_dir.logs, data_dir.lock_file, data_dir.nats]
    found = os.walk(data_dir.nats)
    files = (Path(folder) / name for folder, folders, names in found for name in folders + names)
    return all(os.access(path, os.W_OK) for path in (*own, *files) if os.path.lexists(path))


@contextmanager
def _shared_lock(data_dir: DataDir) -> Iterator[None]:
    """Hold the lock of a data dir that cannot be written, if it has one that can be read."""
    try:
        handle = os.open(data_dir.lock_file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        yield
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise DataDirError(f"the data dir {data_dir.path} is in use by a deployment") from error
    finally:
        os.close(handle)


def _copy(source: Path, target: Path) -> None:
    """Copy the files of a folder, without their owners and modes."""

    def fail(error: OSError) -> None:
        raise error

    for folder, _, names in os.walk(source, onerror=fail):
        place = target / Path(folder).relative_to(source)
        place.mkdir(mode=0o700)
        for name in names:
            path = Path(folder) / name
            if path.is_file() and name != "lock":
                shutil.copyfile(path, place / name)
