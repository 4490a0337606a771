"""The files in which a nats-server keeps a stream: which of them should have a range of records.

JetStream writes a stream's records to numbered blocks, `<store>/jetstream/<account>/streams/<stream>/msgs/
<n>.blk`. A block begins with its first record: a length (4 bytes), then its sequence number (8).
"""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_HEAD: Final = struct.Struct("<IQ")
_SIZE: Final = (1 << 31) - 1
_SEQUENCE: Final = (1 << 62) - 1
"""The two highest bits of a sequence number are flags."""


@dataclass(frozen=True, slots=True)
class _Block:
    number: int
    path: Path
    first_seq: int | None  # None: the file is too short to have a record


class StoreFiles:
    """The blocks of one stream, as they are now: a server changes damaged ones when it starts."""

    def __init__(self, store: Path, stream: str) -> None:
        folders = sorted(store.glob(f"jetstream/*/streams/{stream}/msgs"))
        self._folder = folders[0] if folders else store
        paths = [path for path in self._folder.glob("*.blk") if path.stem.isdecimal()]
        self._blocks = sorted(
            (_Block(int(path.stem), path, _first_seq(path)) for path in paths), key=lambda one: one.number
        )
        self._last_whole_seq = _last_whole_seq(self._blocks[-1].path) if self._blocks else None
        self._index = _content(self._folder / "index.db")

    @property
    def has_records(self) -> bool:
        """True if a block has a record, or the mark that a server leaves for records that have expired."""
        return any(one.first_seq is not None for one in self._blocks)

    @property
    def looks_damaged(self) -> bool:
        """True if a file is obviously missing, empty or cut off. Damage within a file is found by reading."""
        numbers = [one.number for one in self._blocks]
        is_gapless = not numbers or numbers == list(range(numbers[0], numbers[-1] + 1))
        if not numbers:
            return self._index is not None
        return (
            not is_gapless
            or self._last_whole_seq is None
            or any(one.first_seq is None for one in self._blocks)
        )

    @property
    def marks(self) -> list[list[int]]:
        """Of each block: number, size, times of change (ns), inode. They differ once a block is changed."""
        found = [(one.number, one.path.stat()) for one in self._blocks]
        return [[number, at.st_size, at.st_mtime_ns, at.st_ctime_ns, at.st_ino] for number, at in found]

    def restore_index(self) -> None:
        """Write the index as it was: the one that a server writes no longer names blocks that are missing."""
        if self._index is not None:
            (self._folder / "index.db").write_bytes(self._index)

    def blame(self, first_seq: int, last_seq: int) -> str:
        """Return in words what happened to the file that should have these records."""
        before = [one for one in self._blocks if one.first_seq is not None and one.first_seq <= first_seq]
        after = [one for one in self._blocks if one.first_seq is not None and one.first_seq > last_seq]
        low = before[-1].number if before else 0
        high = after[0].number if after else None
        there = {one.number for one in self._blocks}
        gone = [number for number in range(low + 1, high or low + 2) if number not in there]
        empty = [one for one in self._blocks if one.first_seq is None and low < one.number]
        if empty and (high is None or empty[0].number < high):
            return f"{empty[0].path} has no records"
        if gone and (high is not None or self._last_whole_seq == first_seq - 1):
            return f"{self._folder / f'{gone[0]}.blk'} is missing"
        return f"{before[-1].path} is damaged or cut off" if before else f"no file in {self._folder} has them"


def _first_seq(path: Path) -> int | None:
    with path.open("rb") as file:
        head = file.read(_HEAD.size)
    return _HEAD.unpack(head)[1] & _SEQUENCE if len(head) == _HEAD.size else None


def _last_whole_seq(path: Path) -> int | None:
    """Return the last record of a block, if it ends where the file does; else the file was cut off."""
    data = path.read_bytes()
    place = seq = 0
    while place + _HEAD.size <= len(data):
        size, number = _HEAD.unpack_from(data, place)
        if not size & _SIZE:
            return None
        place += size & _SIZE
        seq = number & _SEQUENCE
    return seq if place == len(data) else None


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None
