"""The KV pool: the keys and values of every layer, as slots of KV heads x numbers of a head.

Layers may differ (`models.base.CellShape`). Latent layers store no values: those are a part of their keys.

A pool also holds the attention kernel that reads it; without one, torch computes attention
(`workers.kv_engine.attention.paged`). On a CPU its memory is reserved first and committed page by page.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from copy import copy
from typing import Final

import torch

from models.base import KVLayout
from workers.kv_engine.attention.kernels import AttentionKernel, PlanningKernel, kernel_for
from workers.kv_engine.attention.states import StatePool
from workers.kv_engine.cache.prefault import PagePrefault
from workers.kv_engine.node import KVNode, kv_dtype_of
from workers.machine import memory


class PagedPool:
    """Keys and values of every layer, tensors of (slots, kv_heads, numbers of a head).

    Args:
        layout: the shapes of the layers' cells.
        kernel: attends over the pool; None takes the device's default kernel, if it has one that computes
            the forms of attention that the layout needs.
        states: the slots of recurrent states, if the layout has any: rows of sequences, and snapshots.

    Attributes:
        is_latent: of each layer, whether its values are a part of its keys.
        states: the recurrent states of sequences; None if the layout has none.
        stored: the tensors that take memory: all keys, and the values of layers that are not latent.
    """

    def __init__(
        self,
        layout: KVLayout,
        *,
        slots: int,
        device: torch.device,
        dtype: torch.dtype,
        kernel: AttentionKernel | None = None,
        states: int = 0,
    ) -> None:
        shapes = layout.shapes
        self.is_latent: Final = [one.is_latent for one in shapes]
        self.keys: Final = _cells([(slots, one.heads, one.key) for one in shapes], device, dtype)
        stored = [(slots, one.heads, one.value) for one in shapes if not one.is_latent]
        values = iter(_cells(stored, device, dtype))
        self.values: Final = [
            keys[..., : one.value] if one.is_latent else next(values)
            for keys, one in zip(self.keys, shapes, strict=True)
        ]
        self.stored: Final = [
            *self.keys,
            *(values for values, one in zip(self.values, shapes, strict=True) if not one.is_latent),
        ]
        self.kernel = kernel if kernel is not None else kernel_for(device.type, layout.needs)
        self.states: Final = (
            StatePool(layout, slots=states, device=device, dtype=dtype) if layout.states else None
        )
        has_cells = any(cells.nbytes for cells in self.stored)
        self._prefault: Final = PagePrefault(self.stored) if device.type == "cpu" and has_cells else None

    @classmethod
    def of(
        cls, node: KVNode, *, slots: int, kernel: AttentionKernel | None = None, states: int = 0
    ) -> "PagedPool":
        """Return a pool with the shape, dtype and device that the node's layers need."""
        dtype = kv_dtype_of(node)
        return cls(node.layout, slots=slots, device=node.device, dtype=dtype, kernel=kernel, states=states)

    @property
    def has_static_kernel(self) -> bool:
        """True if its kernel reads a step on the device only, so that a recording needs no plan."""
        return self.kernel is not None and not isinstance(self.kernel, PlanningKernel)

    def by_layer(self) -> Iterator[torch.Tensor]:
        """Yield what is stored layer by layer: keys, and values unless the layer is latent."""
        for keys, values, is_latent in zip(self.keys, self.values, self.is_latent, strict=True):
            yield keys
            if not is_latent:
                yield values

    def with_kernel(self, kernel: AttentionKernel) -> "PagedPool":
        """Return a pool over the same memory with another attention kernel."""
        other = copy(self)
        other.kernel = kernel
        return other

    def mark_used(self, tokens: int) -> None:
        """Note that the first `tokens` slots are in use; on a CPU `prepare` commits the pages after them."""
        if self._prefault is not None:
            self._prefault.mark_used(tokens)

    def prepare(self, max_s: float) -> bool:
        """Commit memory pages of slots that are used next, for `max_s`; return True if more are left."""
        return self._prefault is not None and self._prefault.commit(max_s)


def _cells(
    shapes: Sequence[tuple[int, int, int]], device: torch.device, dtype: torch.dtype
) -> list[torch.Tensor]:
    """Return zeros of these shapes; those of one shape are parts of one tensor, layer after layer."""
    found: dict[tuple[int, int, int], Iterator[torch.Tensor]] = {
        shape: iter(_zeros((count, *shape), device, dtype).unbind())
        for shape, count in Counter(shapes).items()
    }
    return [next(found[shape]) for shape in shapes]


def _zeros(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Return zeros; on a CPU the operating system commits each page at its first use.

    `torch.zeros` touches every page: 12 s for 5 GiB on a virtual machine, and all memory is taken at once.
    """
    if device.type != "cpu":
        return torch.zeros(shape, device=device, dtype=dtype)
    if not math.prod(shape):  # of layers without attention
        return torch.zeros(shape, dtype=dtype)
    # Large pages: a step reads from as many places as there are tokens, heads and layers.
    pages = memory.zeros(math.prod(shape) * dtype.itemsize)
    return torch.frombuffer(pages, dtype=dtype).view(shape)
