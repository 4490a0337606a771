"""A folder of a process's own for temporary files, which does not outlive it.

A process that is killed cannot remove its folder, so the next one does: it removes the folders whose lock
nobody holds.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

_PREFIX: Final = "dalsegno-media-"
_LOCK: Final = "lock"


@contextmanager
def own_folder(parent: Path | None = None) -> Iterator[Path]:
    """Make a locked folder in `parent` (default: the system's folder of temporary files), and remove it."""
    parent = parent or Path(tempfile.gettempdir())
    _remove_abandoned(parent)
    folder, lock = _locked_folder(parent)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _locked_folder(parent: Path) -> tuple[Path, int]:
    """A new folder and its held lock, as a file descriptor."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))  # for this user only
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / _LOCK).exists():
            return folder, lock
        os.close(lock)  # another process took the folder for an abandoned one before it was locked


def _remove_abandoned(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # another user's, or one that is being made or removed now
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            finally:
                os.close(lock)
