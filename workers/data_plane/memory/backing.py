"""The file an arena is made of: anonymous (`memfd`), or named in /dev/shm.

Anonymous is the rule: others open it as `/proc/<pid>/fd/<n>`, and when its owner is gone, however it went, so
is the memory. No name, so nothing to clean up.

Named is for workers that do not see each other's processes (containers that share /dev/shm). Such a file
would outlive a killed owner, so its owner holds a lock on it for life: the kernel drops the lock with the
process, and whoever starts next removes files that nobody holds (`sweep`). The lock has a descriptor of its
own, closed in a forked child, or a child that lives on would hold its dead parent's lock.

A page is zeroed by the kernel when it is first touched, and that costs ten times what writing it costs: pages
are made ready before they are used. That also says clearly, and not by SIGBUS, when there is no memory left.
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
"""Linux 5.14; `mmap` does not name it."""

_libc: Final = ctypes.CDLL(None, use_errno=True)
"""Its calls let other threads run meanwhile; `mmap.madvise` does not."""


class Backing:
    """A file of a layout's length, mapped for writing; sparse until pages of it are made ready.

    Attributes:
        fd: open for life.
        path: where it is a named file.
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
        """Whether pages can be given back: a reader of a hole in a full /dev/shm would die of it."""
        return self.path is None

    def make_ready(self, start: int, stop: int) -> None:
        """Take memory for these bytes, whole pages, now.

        Raises:
            OSError: there is none.
        """
        if self.path is not None:
            os.posix_fallocate(self.fd, start, stop - start)
        if self._advise(_MADV_POPULATE_WRITE, start, stop) not in {
            0,
            errno.EINVAL,
        }:  # EINVAL: an older kernel
            raise OSError(errno.ENOMEM, "the system has no memory left for tensors")

    def give_back(self, start: int, stop: int) -> None:
        """These bytes, whole pages, are not needed now: they are zeros, and take no memory."""
        self._advise(mmap.MADV_REMOVE, start, stop)

    def close(self) -> None:
        """The name is gone at once, the memory with the last view of it."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)
        self.let_go()

    def let_go(self) -> None:
        """Close what is open here; in a forked child, whose parent has it open."""
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
    """Memory that others reach as a descriptor of this process.

    Raises:
        OSError: the system gives none.
    """
    fd = os.memfd_create(MEMFD_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, layout.length)
    # Nobody can cut off what a reader has mapped, which would be the reader's death.
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    os.pwrite(fd, layout.header(), 0)
    return Backing(fd, layout)


def named(layout: Layout, folder: Path = FOLDER) -> Backing:
    """A locked file in `folder`, which is in memory.

    Raises:
        OSError: the folder cannot be written, or is full.
    """
    for _ in range(_TRIES):
        path = folder / f"{_PREFIX}{secrets.token_hex(8)}"
        new = path.with_suffix(_NEW)
        fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        lock = os.open(new, os.O_RDWR | os.O_CLOEXEC)
        try:
            # Under its final name nobody ever sees it without its lock. Before, a sweep may have taken it.
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
    """Remove the files of owners that are gone; how many there were."""
    removed = 0
    for path in folder.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, or gone meanwhile
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                if is_abandoned(fd):
                    path.unlink()
                    removed += 1
            finally:
                os.close(fd)
    return removed


def is_abandoned(fd: int) -> bool:
    """Whether nobody holds the lock of a named file; by a shared lock, so that askers do not disturb."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(fd, fcntl.LOCK_UN)
    return True
