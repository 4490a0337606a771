"""Keys and values of a tensor-parallel group as those of one rank, to hand a sequence to another group.

Each member's pool has its part of the KV heads, in the same blocks. The leader collects the parts and joins
them to what a single rank would have, and cuts what it is given in the same way. So groups of any sizes hand
sequences over to one another, and to single ranks (issue 22).

    leader    an order: read these cells           ──> follower
    follower  its part of each stored tensor       ──> leader
    leader    an order: write these cells, parts   ──> follower

Cells are moved in runs, so that no message exceeds `RUN_BYTES`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch

from models.base import KVLayout
from workers.kv_engine.attention.pool import PagedPool
from workers.kv_engine.parallel.connection import Connection, GroupLostError

RUN_BYTES: Final = 1 << 26
"""The most bytes of one stored tensor in a message."""
_READ: Final = -1
_WRITE: Final = -2
"""What the first number of an order is; that of a step is its number of tokens."""


@dataclass(frozen=True, slots=True)
class CellOrder:
    """An order to a follower: `cells` of its pool, (tokens,) int64, are read, or else written."""

    cells: torch.Tensor
    is_read: bool


def order_of(data: bytes | bytearray, device: torch.device) -> CellOrder | None:
    """The order in a leader's message; None for a step."""
    numbers = np.frombuffer(data, np.int32, len(data) // 4)
    if not len(numbers) or numbers[0] not in (_READ, _WRITE):
        return None
    cells = torch.from_numpy(numbers[1:].astype(np.int64)).to(device)
    return CellOrder(cells, is_read=bool(numbers[0] == _READ))


def carry_out(order: CellOrder, pool: PagedPool, leader: Connection) -> None:
    """Carry out an order of the leader, as a follower.

    Raises:
        GroupLostError: the leader is lost, or sends what does not fit.
    """
    for cache in pool.by_layer():
        if order.is_read:
            leader.send(_bytes_of(cache.index_select(0, order.cells)))
            continue
        data = leader.receive()
        shape = (len(order.cells), *cache.shape[1:])
        if len(data) != cache[0].nbytes * len(order.cells):
            raise GroupLostError(
                f"the leader sent {len(data)} bytes of keys and values for {shape}: expected all members to "
                "run one version"
            )
        cache.index_copy_(0, order.cells, _tensor_of(data, cache.dtype).view(shape).to(cache.device))


class SharedCells:
    """The leader's view of the pools of its group.

    Args:
        pool: the leader's own.
        layout: that of the leader's part.
        connections: to the followers, in the order of their parts.
    """

    def __init__(self, pool: PagedPool, layout: KVLayout, connections: Sequence[Connection]) -> None:
        self._pool = pool
        self._shapes: Final = layout.shapes
        self._connections = connections

    def read(self, cells: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield each stored tensor's content in `cells`, (tokens, all heads, numbers), on the CPU.

        Raises:
            GroupLostError: a follower is lost.
        """
        runs = [self._read_run(run) for run in self._runs(cells)]
        for planes in zip(*runs, strict=True):
            yield torch.cat(planes)

    def write(self, cells: torch.Tensor, planes: Sequence[torch.Tensor]) -> None:
        """Write each stored tensor's content, (tokens, all heads, numbers), into `cells` of all members.

        Raises:
            GroupLostError: a follower is lost.
        """
        begin = 0
        for run in self._runs(cells):
            self._write_run(run, [plane[begin : begin + len(run)] for plane in planes])
            begin += len(run)

    def _runs(self, cells: torch.Tensor) -> Iterator[torch.Tensor]:
        widest = max(cache[0].nbytes for cache in self._pool.by_layer())
        yield from torch.split(cells, max(1, RUN_BYTES // widest))

    def _order(self, kind: int, cells: torch.Tensor) -> None:
        data = np.concatenate([[kind], cells.cpu().numpy()]).astype(np.int32).tobytes()
        for connection in self._connections:
            connection.send(data)

    def _read_run(self, cells: torch.Tensor) -> list[torch.Tensor]:
        self._order(_READ, cells)
        found = []
        for cache, is_latent in self._stored():
            own = cache.index_select(0, cells).cpu()
            parts = [_tensor_of(one.receive(), cache.dtype).view(own.shape) for one in self._connections]
            # All members keep the whole of a latent, which all heads share.
            found.append(own if is_latent else torch.cat([own, *parts], dim=1))
        return found

    def _write_run(self, cells: torch.Tensor, planes: Sequence[torch.Tensor]) -> None:
        self._order(_WRITE, cells)
        members = 1 + len(self._connections)
        for (cache, is_latent), plane in zip(self._stored(), planes, strict=True):
            own, *others = [plane] * members if is_latent else plane.chunk(members, dim=1)
            cache.index_copy_(0, cells, own.contiguous().to(cache.device))
            for connection, part in zip(self._connections, others, strict=True):
                connection.send(_bytes_of(part))

    def _stored(self) -> Iterator[tuple[torch.Tensor, bool]]:
        """Yield each stored tensor, and whether it is a latent."""
        caches = self._pool.by_layer()
        for shape in self._shapes:
            for _ in range(1 if shape.is_latent else 2):
                yield next(caches), shape.is_latent


def whole_layout(part: KVLayout, members: int) -> KVLayout:
    """The layout of a node of which each of so many members has `part`."""
    cells = tuple(
        shape if shape.is_latent else replace(shape, heads=shape.heads * members) for shape in part.cells
    )
    is_latent = bool(part.cells) and all(shape.is_latent or not shape.heads for shape in part.cells)
    heads = part.kv_heads if is_latent else part.kv_heads * members
    return replace(part, kv_heads=heads, cells=cells)


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().cpu().view(torch.uint8).numpy().tobytes()


def _tensor_of(data: bytearray, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(data, dtype=dtype)
