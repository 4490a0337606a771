"""The KV pool: the keys and values of every layer, as slots of `kv_heads` x `head_dim` numbers.

A pool also names the attention kernel that reads it; without one, torch computes attention
(`workers.kv_engine.attention.paged`). On a CPU its memory is reserved first and committed page by page.
"""

import math
from copy import copy
from typing import Final

import torch

from workers.kv_engine.attention.kernels import AttentionKernel, default_kernel
from workers.kv_engine.cache.pages import Pages
from workers.kv_engine.node import Node
from workers.machine import memory


class PagedPool:
    """Keys and values of every layer: `slots` cells of `kv_heads` x `head_dim`."""

    def __init__(
        self,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        slots: int,
        device: torch.device,
        dtype: torch.dtype,
        kernel: AttentionKernel | None = None,
    ) -> None:
        shape = (layers, slots, kv_heads, head_dim)
        self.keys: Final = _zeros(shape, device, dtype).unbind()
        self.values: Final = _zeros(shape, device, dtype).unbind()
        self.kernel = kernel if kernel is not None else default_kernel(device.type)
        self._pages: Final = Pages([*self.keys, *self.values]) if device.type == "cpu" else None

    @classmethod
    def of(cls, node: Node, *, slots: int, kernel: AttentionKernel | None = None) -> "PagedPool":
        """A pool as a node's layers need it; `kernel` attends to it, or the one that is the device's."""
        return cls(
            layers=node.layout.layers,
            kv_heads=node.layout.kv_heads,
            head_dim=node.layout.head_dim,
            slots=slots,
            device=node.device,
            dtype=node.dtype,
            kernel=kernel,
        )

    def with_kernel(self, kernel: AttentionKernel) -> "PagedPool":
        """The same cells, and another kernel that attends to them."""
        other = copy(self)
        other.kernel = kernel
        return other

    def reach(self, tokens: int) -> None:
        """So many cells are in use, from the first on."""
        if self._pages is not None:
            self._pages.reach(tokens)

    def prepare(self, most_s: float) -> bool:
        """Have the memory of the next cells ready, as far as it comes in that time; whether there is more."""
        return self._pages is not None and self._pages.take(most_s)


def _zeros(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Zeros; on a CPU of pages that are there only when they are used.

    `torch.zeros` touches every page: 12 s for 5 GiB on a virtual machine, and the memory is gone at once.
    """
    if device.type != "cpu":
        return torch.zeros(shape, device=device, dtype=dtype)
    # Large pages: a step looks into as many places as there are tokens, heads and layers.
    pages = memory.zeros(math.prod(shape) * dtype.itemsize)
    return torch.frombuffer(pages, dtype=dtype).view(shape)
