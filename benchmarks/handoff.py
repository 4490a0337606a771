"""Handoff of a tensor between two processes, 4 KB to 256 MB, by every available transport.

A round: the owner has a slot (or copies a tensor into one) and sends the handle over a pipe; the reader
decodes it, gets the bytes, checks them, and answers; the owner frees the slot. The reported time is the
minimum of several whole rounds, because other load on the machine only adds to it. *In place* means that the
tensor was computed in its slot, without a copy; the computation is not counted. A view costs nothing more
until it is read; one row reads it.

For comparison: a plain copy of the bytes from warm memory to warm memory, and a file per tensor in /dev/shm:
written, read and copied once more to be writable, as servers that pass tensors as files do.
"""

import asyncio
import contextlib
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final, TypeAlias

import msgspec
import numpy as np

from benchmarks.machine import new_loop
from benchmarks.report import RATIO, Figure
from shared.errors import CapacityError, TensorGone
from shared.tensors import Handle
from workers.data_plane import assembly
from workers.data_plane.port import Bytes
from workers.data_plane.store import ArenaStore, MakeTransport, open_store
from workers.data_plane.transports.local import LocalTransport
from workers.data_plane.transports.shm import ShmTransport
from workers.data_plane.transports.shm_named import NamedShmTransport

KB: Final = 1 << 10
MB: Final = 1 << 20
SIZES: Final = (4 * KB, 64 * KB, MB, 16 * MB, 64 * MB, 256 * MB)
ARENA_BYTES: Final = 320 * MB
PASSES: Final = 3
"""Passes over all transports, so that a busy minute of the machine does not affect only one of them."""
LEAST_ROUNDS: Final = 4
MOST_ROUNDS: Final = 300
ENOUGH_S: Final = 0.1
SHARED_MEMORY: Final = Path("/dev/shm")

_VIEWS: Final = frozenset({"in process, in place", "shm, in place", "shm, by name, in place"})
"""Rows in which no byte is moved."""
_OWNER: Final = (0, 1)
_READER: Final = (1, 2)

Round: TypeAlias = Callable[[], None]
Times: TypeAlias = dict[int, float | str]
"""By size, the minimum seconds of a round, or the reason why there are none."""


class _FailedError(Exception):
    """The reader did not get the expected bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """A transport, as both processes construct it."""

    name: str
    makes: Callable[[], Sequence[MakeTransport]]
    is_named: bool = False

    def open(self, folder: str) -> ArenaStore:
        return open_store(
            total_bytes=ARENA_BYTES,
            transports=self.makes(),
            memory="named" if self.is_named else "anonymous",
            folder=Path(folder),
        )


def _transports(name: str) -> Sequence[MakeTransport]:
    return assembly.make_transports([name], assembly.ListenAddress())


WAYS: Final = {
    "shm": _Way(name="shm", makes=lambda: [ShmTransport]),
    "shm, by name": _Way(name="shm, by name", makes=lambda: [NamedShmTransport], is_named=True),
    **{
        name: _Way(name=name, makes=lambda name=name: _transports(name))  # type: ignore[misc]
        for name in assembly.NAMES
        if name in {"tcp", "nixl"}
    },
}


def main() -> None:
    table = _measured()
    for _ in range(PASSES - 1):
        for name, times in _measured().items():
            table[name] = {nbytes: _less(table[name][nbytes], times[nbytes]) for nbytes in SIZES}
    for figure in _ratios(table):
        print(figure.line())
    print(_drawn(table))


def _measured() -> dict[str, Times]:
    """Measure every transport once."""
    table: dict[str, Times] = {"memcpy, warm to warm": _timed(_memcpy)}
    with tempfile.TemporaryDirectory(prefix="dalsegno-bench-", dir=SHARED_MEMORY) as folder:
        table |= _in_process()
        for way in WAYS.values():
            table |= _between_processes(way, folder)
        with _reader("file", folder) as connection:
            table["file per tensor in /dev/shm"] = _timed(lambda nbytes: _file(nbytes, connection, folder))
    return table


def _less(one: float | str, other: float | str) -> float | str:
    """Return the shorter time, or the failure if one pass failed."""
    if isinstance(one, str):
        return one
    return other if isinstance(other, str) else min(one, other)


def _ratios(table: dict[str, Times]) -> Iterator[Figure]:
    file, copy = table["file per tensor in /dev/shm"], table["memcpy, warm to warm"]
    for row in ("shm, in place", "shm, copied in", "tcp, in place"):
        yield from _ratio(f"64 MB: file per tensor / {row}", file, table.get(row), 64 * MB)
    yield from _ratio("64 MB: shm, copied in / memcpy", table["shm, copied in"], copy, 64 * MB)
    in_place = table["shm, in place"]
    large, small = in_place[256 * MB], in_place[4 * KB]
    if isinstance(large, float) and isinstance(small, float):
        yield Figure("shm, in place: 256 MB / 4 KB", large / small, RATIO, f"{large * 1e6:.0f} us")


def _ratio(name: str, above: Times, below: Times | None, nbytes: int) -> Iterator[Figure]:
    one, other = above[nbytes], below[nbytes] if below is not None else ""
    if isinstance(one, float) and isinstance(other, float):
        note = f"{_shown(one, 0)} and {_shown(other, 0)}"
        yield Figure(name, one / other, RATIO, note)


# ---- rounds ----------------------------------------------------------------------------------------------


def _memcpy(nbytes: int) -> Round:
    given, taken = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
    return lambda: np.copyto(taken, given)


def _in_process() -> dict[str, Times]:
    store = open_store(total_bytes=ARENA_BYTES, transports=[LocalTransport])
    store.begin_incarnation(*_OWNER)

    def told(handle: Handle) -> None:
        packed = msgspec.msgpack.encode(handle)
        again = msgspec.msgpack.decode(packed, type=Handle)
        getting = store.get(again)
        with contextlib.suppress(StopIteration):  # the tensor is present: nothing to wait for
            getting.send(None)
        store.check(again)
        store.release(handle)

    def in_place(nbytes: int) -> Round:
        return lambda: told(_allocated(store, nbytes))

    def copied_in(nbytes: int) -> Round:
        given = np.ones(nbytes, np.uint8)
        return lambda: told(_put(store, given))

    found = {"in process, in place": _timed(in_place), "in process, copied in": _timed(copied_in)}
    asyncio.run(store.close())
    return found


def _between_processes(way: _Way, folder: str) -> dict[str, Times]:
    store = way.open(folder)
    store.begin_incarnation(*_OWNER)
    found: dict[str, Times] = {}
    try:
        with _reader(way.name, folder) as connection:
            connection.send_bytes(msgspec.msgpack.encode(store.endpoints))
            store.add_peer(*_READER, msgspec.msgpack.decode(connection.recv_bytes(), type=dict[str, bytes]))

            def told(handle: Handle, order: bytes) -> None:
                connection.send_bytes(order + msgspec.msgpack.encode(handle))
                if wrong := connection.recv_bytes():
                    raise _FailedError(wrong.decode())
                store.release(handle)

            def in_place(order: bytes) -> Callable[[int], Round]:
                return lambda nbytes: lambda: told(_allocated(store, nbytes), order)

            def copied_in(nbytes: int) -> Round:
                given = np.ones(nbytes, np.uint8)
                return lambda: told(_put(store, given), _LOOK)

            found[f"{way.name}, in place"] = _timed(in_place(_LOOK))
            found[f"{way.name}, copied in"] = _timed(copied_in)
            if way.name == "shm":
                found["shm, in place, every byte read"] = _timed(in_place(_READ))
    finally:
        asyncio.run(store.close())
    return found


def _allocated(store: ArenaStore, nbytes: int) -> Handle:
    handle, slot = store.allocate("key", "uint8", (nbytes,), scope="round")
    slot[0] = 1
    return handle


def _put(store: ArenaStore, given: Bytes) -> Handle:
    return store.put("key", "uint8", given.shape, given, scope="round")


def _file(nbytes: int, connection: Connection, folder: str) -> Round:
    given, path = np.ones(nbytes, np.uint8), Path(folder, "tensor")

    def round_() -> None:
        path.write_bytes(given.data)
        connection.send_bytes(bytes(path))
        connection.recv_bytes()
        path.unlink()

    return round_


# ---- the other process -----------------------------------------------------------------------------------

_LOOK: Final = b"l"
_READ: Final = b"r"


@contextlib.contextmanager
def _reader(way: str, folder: str) -> Iterator[Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_read, args=(theirs, way, folder), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        process.join()


def _read(connection: Connection, way: str, folder: str) -> None:
    try:
        if way == "file":
            _read_files(connection)
        with new_loop() as loop:
            loop.run(_read_tensors(connection, WAYS[way].open(folder)))
    except EOFError:
        return


def _read_files(connection: Connection) -> None:
    while True:
        found = bytearray(Path(connection.recv_bytes().decode()).read_bytes())
        assert found[0] == 1
        connection.send_bytes(b"")


async def _read_tensors(connection: Connection, store: ArenaStore) -> None:
    store.begin_incarnation(*_READER)
    store.add_peer(*_OWNER, msgspec.msgpack.decode(connection.recv_bytes(), type=dict[str, bytes]))
    connection.send_bytes(msgspec.msgpack.encode(store.endpoints))
    decoder = msgspec.msgpack.Decoder(Handle)
    try:
        while True:
            words = connection.recv_bytes()
            handle = decoder.decode(memoryview(words)[1:])
            try:
                found = await store.get(handle)
            except TensorGone as error:
                connection.send_bytes(error.message.encode())
                continue
            if words[:1] == _READ:
                found[: found.size & ~7].view(np.uint64).max()
            assert found[0] == 1
            store.check(handle)
            del found
            connection.send_bytes(b"")
    finally:
        await store.close()


# ---- the table -------------------------------------------------------------------------------------------


def _timed(make: Callable[[int], Round]) -> Times:
    found: Times = {}
    for nbytes in SIZES:
        try:
            found[nbytes] = _least_s(make(nbytes))
        except CapacityError:
            found[nbytes] = "no room"
        except _FailedError as error:
            print(f"  {_size(nbytes)}: {error}")
            found[nbytes] = "failed"
    return found


def _least_s(round_: Round) -> float:
    """Return the minimum of several rounds, after two that warm the memory."""
    for _ in range(2):
        round_()
    taken_s: list[float] = []
    begun_s = time.perf_counter()
    while len(taken_s) < LEAST_ROUNDS or (
        len(taken_s) < MOST_ROUNDS and time.perf_counter() - begun_s < ENOUGH_S
    ):
        at_s = time.perf_counter()
        round_()
        taken_s.append(time.perf_counter() - at_s)
    return min(taken_s)


def _drawn(table: dict[str, Times]) -> str:
    width = max(map(len, table))
    head = " " * (width + 2) + "".join(f"{_size(nbytes):>18}" for nbytes in SIZES)
    rows = [
        f"  {name:<{width}}"
        + "".join(f"{_shown(times[nbytes], 0 if name in _VIEWS else nbytes):>18}" for nbytes in SIZES)
        for name, times in table.items()
    ]
    return "\n".join(["minimum time of a round, and GB/s where bytes are moved", head, *rows])


def _size(nbytes: int) -> str:
    return f"{nbytes // MB} MB" if nbytes >= MB else f"{nbytes // KB} KB"


def _shown(taken_s: float | str, nbytes: int) -> str:
    if isinstance(taken_s, str):
        return taken_s
    taken = f"{taken_s * 1e6:.0f} us" if taken_s < 1e-3 else f"{taken_s * 1e3:.2f} ms"
    return f"{taken} ({nbytes / taken_s / 1e9:.2g})" if nbytes else taken
