"""Detection of what a CUDA graph cannot record: operations for which the host waits for the device.

A capture that such an operation breaks cannot be undone: torch's allocator keeps the half-made graph's pool
open, and each later capture of the process fails with another message. So they are looked for before.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_READS: Final = frozenset(
    {
        "_local_scalar_dense",  # item, int, bool, if
        "bincount",
        "equal",
        "masked_select",
        "nonzero",
        "unique_consecutive",
        "unique_dim",
        "_unique",
        "_unique2",
    }
)
"""Operations whose result, or its shape, the host reads."""
_INDEXED: Final = frozenset({"index", "index_put", "index_put_"})
"""Operations that are `nonzero`, too, if an index is a mask."""
_COPIES: Final = frozenset({"_to_copy", "copy_"})


class HostReadError(RuntimeError):
    """An operation makes the host wait for the device; the message names it."""


class RefuseHostReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within this context, an operation that a CUDA graph cannot record raises `HostReadError`.

    It runs everything else, and sees no launch of a Triton kernel.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = _host_read(func, args, kwargs or {})
        if found:
            raise HostReadError(f"{func} {found}")
        return func(*args, **(kwargs or {}))


def _host_read(func: Any, args: Any, kwargs: dict[str, Any]) -> str:
    """Why the host waits for an operation; empty if it does not."""
    name = func.overloadpacket.__name__
    if name in _READS:
        return "reads a result on the host"
    if name == "repeat_interleave" and kwargs.get("output_size") is None:
        return "reads the size of its result on the host"
    if name in _INDEXED and any(_is_mask(leaf) for leaf in tree_leaves(args[1])):
        return "has a mask as index: it reads the number of its elements on the host"
    if name in _COPIES and len(_devices(args, kwargs)) > 1 and not _is_asynchronous(args, kwargs):
        return "copies between devices, and waits for it"
    return ""


def _is_asynchronous(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    # `copy_` may give it by position: (to, from, non_blocking).
    return bool(kwargs.get("non_blocking") or (len(args) > 2 and args[2]))


def _is_mask(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dtype in (torch.bool, torch.uint8)


def _devices(args: Iterable[Any], kwargs: dict[str, Any]) -> set[str]:
    """The types of device of the tensors of a call, and of its result if the call names it."""
    leaves = tree_leaves((args, kwargs))
    found = {leaf.device.type for leaf in leaves if isinstance(leaf, torch.Tensor)}
    return found | {torch.device(leaf).type for leaf in leaves if isinstance(leaf, torch.device)}
