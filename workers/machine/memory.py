"""The memory that this process may still take, by operating system and container; allocator settings."""

import ctypes
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_MEMINFO: Final = Path("/proc/meminfo")
_CGROUP: Final = Path("/sys/fs/cgroup")
_TRIM_THRESHOLD: Final = -1  # malloc.h
_MMAP_THRESHOLD: Final = -3  # malloc.h
_OF_ITS_OWN: Final = 1 << 20
_LARGEST: Final = 32 << 20
_CACHE_LINE: Final = 64
_HUGE_PAGE: Final = 2 << 20
_MAPPING: Final = 64 << 20


def available_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int:
    """Return the available memory; if the system does not report it, half of the installed memory."""
    limits = [limit for limit in (_meminfo_bytes(meminfo), _cgroup_bytes(cgroup)) if limit is not None]
    if limits:
        return min(limits)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def zeros(nbytes: int) -> mmap.mmap:
    """Return zeroed memory that is allocated on use, in huge pages where the operating system has them.

    The mapping is private: Python's anonymous mappings are shared by default, and Linux gives those no huge
    pages (`shmem_enabled` is `never`).
    """
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, nbytes)
    made = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        made.madvise(mmap.MADV_HUGEPAGE)
    return made


class Zeros:
    """Hands out zeroed memory in pieces of large mappings.

    In a mapping of its own, a piece of a few megabytes has huge pages only between the multiples of 2 MB that
    happen to be in it: 98 to 260 MB of 190 matrices of 2.4 MB (2026-11). What is not used of a mapping takes
    no memory.
    """

    def __init__(self) -> None:
        self._free = memoryview(b"")

    def take(self, nbytes: int) -> memoryview:
        """Return a piece, aligned to cache lines. A mapping lives as long as one of its pieces."""
        whole = -(-nbytes // _CACHE_LINE) * _CACHE_LINE
        if whole > len(self._free):
            self._free = memoryview(zeros(max(_MAPPING, -(-whole // _HUGE_PAGE) * _HUGE_PAGE)))
        piece, self._free = self._free[:nbytes], self._free[whole:]
        return piece


@contextmanager
def given_back() -> Iterator[None]:
    """Return freed memory to the operating system at once, within a block that allocates much temporarily.

    glibc serves a block from a heap, which keeps its holes, unless it is larger than a threshold; the
    threshold grows with freed blocks, up to 32 MB. A model of eight bits is read as float32, matrix by
    matrix, and packed from floats: 0.9 GB of them left 2.4 GB allocated, of which 0.7 GB were in use
    (2026-11).

    Afterwards the threshold is that maximum, so steps that allocate and free tensors fault no pages in again.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # no glibc, so there is no such setting
        yield
        return
    mallopt(_MMAP_THRESHOLD, _OF_ITS_OWN)
    try:
        yield
    finally:
        mallopt(_MMAP_THRESHOLD, _LARGEST)
        mallopt(_TRIM_THRESHOLD, 2 * _LARGEST)  # glibc's own rule, which setting the other threshold disables


def _meminfo_bytes(path: Path) -> int | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else None


def _cgroup_bytes(folder: Path) -> int | None:
    """Return what a container's limit leaves (cgroup v2); None without a limit."""
    try:
        limit = (folder / "memory.max").read_text().strip()
        used = int((folder / "memory.current").read_text())
    except (OSError, ValueError):
        return None
    return max(int(limit) - used, 0) if limit.isdecimal() else None
