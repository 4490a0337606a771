"""The KV pool: the keys and values of every layer, as slots of `kv_heads` x `head_dim` numbers.

A pool also holds the attention kernel that reads it; without one, torch computes attention
(`workers.kv_engine.attention.paged`). On a CPU its memory is reserved first and committed page by page.
"""

import math
from copy import copy
from typing import Final

import torch

from workers.kv_engine.attention.kernels import AttentionKernel, default_kernel
from workers.kv_engine.cache.prefault import PagePrefault
from workers.kv_engine.node import KVNode
from workers.machine import memory


class PagedPool:
    """Keys and values of every layer, each a tensor of (slots, kv_heads, head_dim).

    Args:
        kernel: attends over the pool; None takes the device's default kernel, if it has one.
    """

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
        self._prefault: Final = PagePrefault([*self.keys, *self.values]) if device.type == "cpu" else None

    @classmethod
    def of(cls, node: KVNode, *, slots: int, kernel: AttentionKernel | None = None) -> "PagedPool":
        """Return a pool with the shape, dtype and device that the node's layers need."""
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


def _zeros(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Return zeros; on a CPU the operating system commits each page at its first use.

    `torch.zeros` touches every page: 12 s for 5 GiB on a virtual machine, and all memory is taken at once.
    """
    if device.type != "cpu":
        return torch.zeros(shape, device=device, dtype=dtype)
    # Large pages: a step reads from as many places as there are tokens, heads and layers.
    pages = memory.zeros(math.prod(shape) * dtype.itemsize)
    return torch.frombuffer(pages, dtype=dtype).view(shape)
