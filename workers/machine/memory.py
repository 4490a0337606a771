"""How much memory this process may still take, as operating system and container say; and how it is taken."""

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


def available_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int:
    """Memory that is available now; where the system does not say, half of what is installed."""
    limits = [limit for limit in (_meminfo_bytes(meminfo), _cgroup_bytes(cgroup)) if limit is not None]
    if limits:
        return min(limits)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def zeros(nbytes: int) -> mmap.mmap:
    """Memory that is there when it is used, in large pages where the operating system gives them.

    Private: Python's anonymous maps are shared ones unless told otherwise, and of those Linux makes no large
    pages (`shmem_enabled` is `never`).
    """
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, nbytes)
    made = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        made.madvise(mmap.MADV_HUGEPAGE)
    return made


@contextmanager
def given_back() -> Iterator[None]:
    """Give freed memory back to the operating system at once: around what makes much for a moment.

    glibc takes a block from a heap, of which each thread may have its own, unless it is larger than a size
    that grows with what was let go of, up to 32 MB; and a heap keeps its holes. A model of eight bits is read
    by way of float32, matrix by matrix, and packed by way of its floats: 0.9 GB of them left 2.4 GB taken, of
    which 0.7 GB were in use (2026-11).

    Behind it, that size is what it grows to: steps that take and let go of tensors fault no pages in again.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # no glibc, and nothing like this is known of it
        yield
        return
    mallopt(_MMAP_THRESHOLD, _OF_ITS_OWN)
    try:
        yield
    finally:
        mallopt(_MMAP_THRESHOLD, _LARGEST)
        mallopt(_TRIM_THRESHOLD, 2 * _LARGEST)  # glibc's own rule, which setting the other ends


def _meminfo_bytes(path: Path) -> int | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else None


def _cgroup_bytes(folder: Path) -> int | None:
    """What a container's limit leaves (cgroup v2); None where there is none."""
    try:
        limit = (folder / "memory.max").read_text().strip()
        used = int((folder / "memory.current").read_text())
    except (OSError, ValueError):
        return None
    return max(int(limit) - used, 0) if limit.isdecimal() else None
