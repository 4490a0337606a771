import ctypes
import re
import sys
from pathlib import Path

import pytest

from workers import memory


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_zeros_are_where_linux_makes_large_pages_of_what_asks_for_them() -> None:
    pages = memory.zeros(8 << 20)
    at = ctypes.addressof(ctypes.c_char.from_buffer(pages))

    maps = re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    [found] = (one for one in maps if _holds(one, at))
    assert found.split()[1] == "rw-p", "those that are shared get none"
    assert "hg" in found.rpartition("VmFlags:")[2].split()
    assert pages[:] == bytes(8 << 20)


def _holds(told: str, at: int) -> bool:
    begin, end = (int(place, 16) for place in told.split(maxsplit=1)[0].split("-"))
    return begin <= at < end
