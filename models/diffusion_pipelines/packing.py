"""Named tensors in one tensor: an edge between nodes whose number of tensors differs by class of pipeline.

A packed tensor is the bytes of a safetensors file, uint8. Embeddings, masks and pooled states of a prompt are
one edge then, whatever the class calls them.
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

_TENSOR: Final = "tensor"
_LIST: Final = "list"
_TUPLE: Final = "tuple"
_PLAIN: Final = "plain"


def pack(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Pack tensors by name: -> (n,) uint8, on the CPU."""
    stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    return torch.frombuffer(bytearray(save(_apart(stored))), dtype=torch.uint8)


def unpack(packed: torch.Tensor, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
    """Return the tensors of `pack`, on `device`.

    Raises:
        ValueError: the bytes are no packed tensors.
    """
    try:
        found = load(packed.cpu().numpy().tobytes())
    except SafetensorError as error:
        raise ValueError(f"expected packed tensors (safetensors), found something else: {error}") from error
    return {name: tensor.to(device) for name, tensor in found.items()}


def _apart(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors that share no storage: safetensors refuses those that do."""
    seen: set[int] = set()
    kept = {}
    for name, tensor in tensors.items():
        place = tensor.untyped_storage().data_ptr()
        kept[name] = tensor.clone() if place in seen else tensor
        seen.add(place)
    return kept


def flatten(value: Any, name: str, into: dict[str, torch.Tensor]) -> Any:
    """Put the tensors of nested lists and tuples into a dictionary, by name; return their structure.

    The structure is plain JSON; `build` makes the value of it again.

    Raises:
        TypeError: there is something else than tensors, lists, tuples and plain values.
    """
    if isinstance(value, torch.Tensor):
        into[name] = value
        return [_TENSOR, name]
    if isinstance(value, list | tuple):
        kind = _LIST if isinstance(value, list) else _TUPLE
        return [kind, [flatten(one, f"{name}.{index}", into) for index, one in enumerate(value)]]
    if value is None or isinstance(value, bool | int | float | str):
        return [_PLAIN, value]
    raise TypeError(f"{name} is a {type(value).__name__}: expected tensors, lists of them, or plain values")


def build(structure: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Make a value of its structure and the tensors that `flatten` has put aside."""
    kind, content = structure
    if kind == _TENSOR:
        return tensors[content]
    if kind == _PLAIN:
        return content
    parts = [build(one, tensors) for one in content]
    return parts if kind == _LIST else tuple(parts)


def json_tensor(value: Any) -> torch.Tensor:
    """A plain value as a tensor: its JSON, (n,) uint8."""
    return torch.frombuffer(bytearray(msgspec.json.encode(value)), dtype=torch.uint8)


def json_value(tensor: torch.Tensor) -> Any:
    """Return the plain value of `json_tensor`.

    Raises:
        ValueError: the bytes are no JSON.
    """
    return msgspec.json.decode(tensor.cpu().numpy().tobytes())
