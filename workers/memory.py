"""How much memory this process may still take, as operating system and container say; and large pages."""

import mmap
import os
from pathlib import Path
from typing import Final

_MEMINFO: Final = Path("/proc/meminfo")
_CGROUP: Final = Path("/sys/fs/cgroup")


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
