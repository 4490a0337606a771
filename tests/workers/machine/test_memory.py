import ctypes
import re
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Final

import pytest

from workers.machine import memory


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_zeros_are_where_linux_makes_large_pages_of_what_asks_for_them() -> None:
    pages = memory.zeros(8 << 20)
    at = ctypes.addressof(ctypes.c_char.from_buffer(pages))

    maps = re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    [found] = (one for one in maps if _holds(one, at))
    assert found.split()[1] == "rw-p", "those that are shared get none"
    assert "hg" in found.rpartition("VmFlags:")[2].split()
    assert pages[:] == bytes(8 << 20)


_TAKES_AND_LETS_GO: Final = """
import re, sys
from contextlib import nullcontext
from pathlib import Path
from workers.machine.memory import given_back

def anonymous() -> int:
    return int(re.search(r"RssAnon:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

def block(nbytes: int) -> bytearray:
    return bytearray(b"x") * nbytes

del (large := [block(30 << 20)])[:]  # from here on glibc takes what is smaller from its heap
before, kept = anonymous(), []
with given_back() if sys.argv[1] == "given back" else nullcontext():
    held = []
    for _ in range(32):
        held.append(block(4 << 20))
        kept.append(block(64 << 10))
    del held
print(anonymous() - before)
"""


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_what_was_made_for_a_moment_is_given_back_while_that_is_asked_for() -> None:
    def left(how: str) -> int:
        done = subprocess.run(
            [sys.executable, "-c", _TAKES_AND_LETS_GO, how], capture_output=True, check=True
        )
        return int(done.stdout)

    assert left("kept") > 64 << 20, "this is no case of it"
    assert left("given back") < 16 << 20


def _holds(told: str, at: int) -> bool:
    begin, end = (int(place, 16) for place in told.split(maxsplit=1)[0].split("-"))
    return begin <= at < end


def test_pieces_of_memory_are_zero_aligned_and_apart() -> None:
    memory_of = memory.Zeros()
    pieces = [memory_of.take(nbytes) for nbytes in (100, 1, 64, 3 << 20, 80 << 20, 5)]

    assert [len(piece) for piece in pieces] == [100, 1, 64, 3 << 20, 80 << 20, 5]
    assert not any(piece[-1] for piece in pieces)
    starts = [ctypes.addressof(ctypes.c_char.from_buffer(piece)) for piece in pieces]
    assert not any(start % 64 for start in starts)
    for number, piece in enumerate(pieces):
        piece[:] = bytes([number + 1]) * len(piece)
    assert [piece[0] for piece in pieces] == [piece[-1] for piece in pieces] == [1, 2, 3, 4, 5, 6]


def test_a_mapping_is_freed_with_its_last_piece() -> None:
    memory_of = memory.Zeros()
    piece = memory_of.take(1000)
    mapping = weakref.ref(piece.obj)

    memory_of.take(100 << 20)  # of another mapping
    assert mapping() is not None
    del piece
    assert mapping() is None
