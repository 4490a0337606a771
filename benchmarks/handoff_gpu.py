"""Handoff of a tensor between two processes on one GPU: CUDA IPC, compared with a copy through main memory.

    python -m benchmarks.handoff_gpu            needs a GPU, torch with CUDA, and cupy (`dalsegno[gpu]`)

A round: the owner computes a tensor and sends its location over a pipe; the reader sums it on its own stream
and answers; both wait for the GPU only at the end of the round. *Staged* is the path without CUDA IPC: from
the GPU into the arena, over shared memory, and to the reader's GPU. A round without a tensor is measured
first: the pipe and both processes alone.
"""

import contextlib
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Final

import msgspec
import numpy as np
import torch

from benchmarks.machine import described, new_loop
from benchmarks.report import RATIO, Figure
from workers.data_plane.memory import backing
from workers.data_plane.memory.arena import Arena
from workers.data_plane.memory.cuda_driver import Driver, find_driver
from workers.data_plane.memory.device_arena import DeviceArena, DeviceBytes
from workers.data_plane.transport import Locator, Peer
from workers.data_plane.transports.cuda_ipc import CudaIpcTransport
from workers.data_plane.transports.fetch_buffers import ArenaFetchBuffers
from workers.data_plane.transports.shm import ShmTransport

MB: Final = 1 << 20
SIZES: Final = (MB, 16 * MB, 64 * MB, 256 * MB)
ARENA_BYTES: Final = 640 * MB
ROUNDS: Final = 20
_OWNER: Final = (0, 1)
_IPC: Final = b"i"
_NOTHING: Final = b"n"
_STAGED: Final = b"s"


class _Side:
    """One process: its arenas and both transports."""

    def __init__(self, driver: Driver) -> None:
        self.arena = Arena(ARENA_BYTES, backing.anonymous)
        device = driver.getDevice()
        self.gpu = DeviceArena(self.arena, driver, device=device, total_bytes=ARENA_BYTES // 2)
        self.ipc = CudaIpcTransport(self.gpu, ArenaFetchBuffers(self.arena))
        self.shm = ShmTransport(self.arena)


def main() -> None:
    driver = find_driver()
    if driver is None or not torch.cuda.is_available():
        sys.exit(
            "expected a GPU, torch with CUDA and cupy (pip install 'dalsegno[gpu]'): nothing was measured"
        )
    print(described())
    torch.zeros(1, device="cuda")  # torch first: it creates the context that cupy shares
    side = _Side(driver)
    with _reader() as connection:
        connection.send_bytes(msgspec.msgpack.encode((side.ipc.endpoint(), side.shm.endpoint())))
        said_s = _least_s(lambda: _say(connection))
        print(f"  a round without a tensor: {said_s * 1e6:,.0f} us", flush=True)
        for nbytes in SIZES:
            ipc_s = _least_s(lambda nbytes=nbytes: _by_ipc(side, connection, nbytes))  # type: ignore[misc]
            staged_s = _least_s(lambda nbytes=nbytes: _staged(side, connection, nbytes))  # type: ignore[misc]
            note = f"{ipc_s * 1e6:,.0f} us by CUDA IPC, {staged_s * 1e6:,.0f} us staged"
            print(Figure(f"{nbytes // MB} MB: staged / CUDA IPC", staged_s / ipc_s, RATIO, note).line())


def _by_ipc(side: _Side, connection: Connection, nbytes: int) -> None:
    at, slot = side.gpu.allocate(nbytes)
    torch.as_tensor(slot, device="cuda").fill_(1)
    side.gpu.written(at, torch.cuda.current_stream().cuda_stream)
    _tell(connection, _IPC, at)
    side.gpu.free(at.generation)


def _staged(side: _Side, connection: Connection, nbytes: int) -> None:
    made = torch.ones(nbytes, dtype=torch.uint8, device="cuda")
    at = side.arena.allocate(nbytes)
    torch.from_numpy(side.arena.look(at, writable=True)).copy_(made)
    _tell(connection, _STAGED, at)
    side.arena.free(at.generation)


def _say(connection: Connection) -> None:
    connection.send_bytes(_NOTHING + msgspec.msgpack.encode(Locator(0, 0, 0, 0)))
    connection.recv_bytes()


def _tell(connection: Connection, way: bytes, at: Locator) -> None:
    connection.send_bytes(way + msgspec.msgpack.encode(at))
    total = int.from_bytes(connection.recv_bytes(), "big")
    assert total == at.nbytes, f"expected the sum {at.nbytes}, found {total}"


def _least_s(round_: Callable[[], None]) -> float:
    """Return the minimum of several rounds, after two warm-up rounds."""
    taken_s: list[float] = []
    for _ in range(ROUNDS + 2):
        begun_s = time.perf_counter()
        round_()
        taken_s.append(time.perf_counter() - begun_s)
    return min(taken_s[2:])


@contextlib.contextmanager
def _reader() -> Iterator[Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_read, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        process.join()


def _read(connection: Connection) -> None:
    driver = find_driver()
    assert driver is not None, "the owner has one"
    torch.zeros(1, device="cuda")
    side = _Side(driver)
    with new_loop() as loop, contextlib.suppress(EOFError):
        ipc_card, shm_card = msgspec.msgpack.decode(connection.recv_bytes(), type=tuple[bytes, bytes])
        while True:
            words = connection.recv_bytes()
            at = msgspec.msgpack.decode(memoryview(words)[1:], type=Locator)
            if words[:1] == _NOTHING:
                total = torch.zeros(())
            elif words[:1] == _IPC:
                stream = torch.cuda.current_stream().cuda_stream
                found: DeviceBytes = side.ipc.borrow(Peer(*_OWNER, ipc_card), at, stream=stream)
                total = torch.as_tensor(found, device="cuda").sum(dtype=torch.int64)
            else:
                view = loop.run(side.shm.fetch(Peer(*_OWNER, shm_card), at))
                total = torch.from_numpy(np.array(view)).to("cuda").sum(dtype=torch.int64)
            connection.send_bytes(int(total).to_bytes(8, "big"))


if __name__ == "__main__":
    main()
