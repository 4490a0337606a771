"""The file of an arena: anonymous (`memfd`), or named in /dev/shm.

Anonymous is the default: other processes open it as `/proc/<pid>/fd/<n>`. The memory is freed with its owner,
however that ends, and there is no name to clean up.

Named is for workers without a common process namespace (containers that share /dev/shm). Such a file outlives
a killed owner. So the owner holds a lock on it: the kernel drops the lock with the process, and the next
worker that starts removes unlocked files (`sweep`). The lock has its own descriptor, which is closed in
a forked child; else a surviving child would hold its dead parent's lock.

The kernel zeroes a page at the first access, which costs ten times as much as writing it. So pages are made
resident before they are used. A lack of memory is then a clear error, and not a SIGBUS.
"""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import secrets
from pathlib import Path
from typing import Final

from workers.data_plane.memory.layout import Layout

MEMFD_NAME: Final = "dalsegno-arena"
FOLDER: Final = Path("/dev/shm")  # noqa: S108 - shared memory, with a lock and private to its user
_PREFIX: Final = "dalsegno-arena-"
_NEW: Final = ".new"
_TRIES: Final = 5

_MADV_POPULATE_WRITE: Final = 23
"""Linux 5.14; `mmap` has no name for it."""

_libc: Final = ctypes.CDLL(None, use_errno=True)
"""These calls release the GIL; `mmap.madvise` does not."""


class Backing:
    """A file of a layout's length, mapped for writing; sparse until its pages are made resident.

    Attributes:
        fd: open until the backing is closed.
        path: of a named file.
        memory: the whole mapping.
    """

    def __init__(self, fd: int, layout: Layout, *, path: Path | None = None, lock: int | None = None) -> None:
        self.fd = fd
        self.path = path
        self.memory = mmap.mmap(fd, layout.length)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self._lock = lock

    @property
    def may_shrink(self) -> bool:
        """Return True if pages can be returned; a reader of a hole in a full /dev/shm would get a SIGBUS."""
        return self.path is None

    def make_ready(self, start: int, stop: int) -> None:
        """Make these bytes, whole pages, resident.

        Raises:
            OSError: there is no memory.
        """
        if self.path is not None:
            os.posix_fallocate(self.fd, start, stop - start)
        if self._advise(_MADV_POPULATE_WRITE, start, stop) not in {
            0,
            errno.EINVAL,
        }:  # EINVAL: an older kernel
            raise OSError(errno.ENOMEM, "the system has no memory left for tensors")

    def give_back(self, start: int, stop: int) -> None:
        """Return the memory of these bytes, whole pages; they read as zeros."""
        self._advise(mmap.MADV_REMOVE, start, stop)

    def close(self) -> None:
        """Remove the name at once; the memory is freed with its last view."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)
        self.let_go()

    def let_go(self) -> None:
        """Close this process's descriptors, without removing the file."""
        for fd in (self.fd, self._lock):
            if fd is not None:
                os.close(fd)
        self._lock = None

    def _advise(self, advice: int, start: int, stop: int) -> int:
        address, length = ctypes.c_void_p(self._address + start), ctypes.c_size_t(stop - start)
        while _libc.madvise(address, length, ctypes.c_int(advice)):
            if (code := ctypes.get_errno()) != errno.EINTR:
                return code
        return 0


def anonymous(layout: Layout) -> Backing:
    """Make memory that other processes open as a descriptor of this process.

    Raises:
        OSError: the system provides none.
    """
    fd = os.memfd_create(MEMFD_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, layout.length)
    # The file cannot be truncated, which would kill its readers.
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    os.pwrite(fd, layout.header(), 0)
    return Backing(fd, layout)


def named(layout: Layout, folder: Path = FOLDER) -> Backing:
    """Make a locked file in `folder`, which lies in memory.

    Raises:
        OSError: the folder cannot be written, or is full.
    """
    for _ in range(_TRIES):
        path = folder / f"{_PREFIX}{secrets.token_hex(8)}"
        new = path.with_suffix(_NEW)
        fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        lock = os.open(new, os.O_RDWR | os.O_CLOEXEC)
        try:
            # Under its final name the file is always locked. Before, a sweep may have removed it.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.posix_fallocate(fd, 0, len(layout.header()))
            os.ftruncate(fd, layout.length)
            os.pwrite(fd, layout.header(), 0)
            new.rename(path)
        except (BlockingIOError, FileNotFoundError):
            os.close(fd)
            os.close(lock)
            continue
        except OSError:
            new.unlink(missing_ok=True)
            os.close(fd)
            os.close(lock)
            raise
        return Backing(fd, layout, path=path, lock=lock)
    raise OSError(errno.EBUSY, f"{folder}: a new file was removed {_TRIES} times before it was locked")


def sweep(folder: Path = FOLDER) -> int:
    """Remove the files of dead owners, and return their number."""
    removed = 0
    for path in folder.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, or removed meanwhile
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                if is_abandoned(fd):
                    path.unlink()
                    removed += 1
            finally:
                os.close(fd)
    return removed


def is_abandoned(fd: int) -> bool:
    """Return True if a named file's lock is not held. The check takes a shared lock only."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(fd, fcntl.LOCK_UN)
    return True
