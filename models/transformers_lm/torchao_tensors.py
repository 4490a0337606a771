"""Weights of torchao in safetensors: tensors of a matrix `q`, and what the metadata of the file says of it.

    type                        q._weight_qdata         q._weight_scale, q._weight_zero_point
    Int8Tensor                  I8 (outputs, inputs)    one for each block; weights are (q - zero) * scale
    IntxUnpackedToInt8Tensor    as above, of the bits of `target_dtype`
    Float8Tensor                F8 (outputs, inputs)    a scale for each block
    Int4Tensor                  I8 or U8 (outputs, inputs / 2), the first in the low bits
                                                        (groups, outputs); weights are q * scale + zero

`block_size` in the metadata says how many outputs and inputs make a block. Other types have a layout for one
kind of device and are refused by name, as are scales of activations before the product (`act_pre_scale`).
How activations were to be rounded is ignored, as in all formats (`quantised`).

Sources: `flatten_tensor_state_dict` and the tensor classes of torchao 0.18; for Int4Tensor
`int4_row_quantize_zp` and `pack_int4` of FBGEMM.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Final, TypeAlias

import msgspec
import torch
from msgspec import Meta

from models.checkpoints.files import CheckpointError, UnsupportedArchitectureError
from models.checkpoints.weights import Shard, TensorInfo
from models.grouped_weights import GROUP, GroupedWeight, per_group
from models.transformers_lm.scaled_numbers import ScaledParts

METHOD: Final = "torchao"
_NUMBERS: Final = "qdata"
_SCALE: Final = "scale"
_ZEROS: Final = "zero_point"
_OF_ACTIVATIONS: Final = frozenset({"act_quant_scale", "act_quant_zero_point"})
_FLOATS: Final = frozenset({"F32", "F16", "BF16"})
_DTYPES: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    {
        "Int8Tensor": frozenset({"I8"}),
        "IntxUnpackedToInt8Tensor": frozenset({"I8"}),
        "Float8Tensor": frozenset({"F8_E4M3", "F8_E5M2"}),
        "Int4Tensor": frozenset({"I8", "U8"}),
    }
)
"""The dtypes of numbers, by the type of a tensor."""
_TWO_A_BYTE: Final = "Int4Tensor"
_ZERO: Final = 8
"""Of numbers of four bits, what makes them unsigned."""

_Size: TypeAlias = Annotated[int, Meta(ge=1)]


class _Dtype(msgspec.Struct, frozen=True):
    name: str = msgspec.field(name="_data")


class _Attributes(msgspec.Struct, frozen=True):
    block_size: tuple[_Size, _Size]
    target_dtype: _Dtype | None = None


class _Told(msgspec.Struct, frozen=True):
    """The description of a tensor in the metadata of a file."""

    type: str = msgspec.field(name="_type")
    attributes: msgspec.Raw = msgspec.field(name="_data", default=msgspec.Raw(b"{}"))
    parts: list[str] = msgspec.field(name="_tensor_data_names", default_factory=list)


@dataclass(frozen=True, slots=True)
class Int4Parts:
    """The tensors of a matrix of four bits, two numbers in a byte.

    Attributes:
        shape: (outputs, inputs).
        group_size: the inputs that share a scale and a zero.
    """

    numbers: str
    scale: str
    zeros: str
    shape: tuple[int, int]
    group_size: int

    @property
    def names(self) -> list[str]:
        return [self.numbers, self.scale, self.zeros]

    def is_grouped(self, _: Callable[[str], torch.Tensor]) -> bool:
        """True if its groups are made of groups of 32."""
        return not self.group_size % GROUP or self.group_size >= self.shape[1]

    def grouped(self, read: Callable[[str], torch.Tensor]) -> GroupedWeight:
        """Return the weight as it is stored."""
        scale, zero = (per_group(table.T, self.group_size, self.shape[1]) for table in self._floats(read))
        return GroupedWeight(4, self._unsigned(read), scale, zero - _ZERO * scale)

    def floats(self, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """Return the weight, float32 of `shape`."""
        scale, zero = (
            table.T.repeat_interleave(self.group_size, 1)[:, : self.shape[1]] for table in self._floats(read)
        )
        return (self._unsigned(read).float() - _ZERO) * scale + zero

    def _floats(self, read: Callable[[str], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Scales and zeros, (groups, outputs) each."""
        return read(self.scale).float(), read(self.zeros).float()

    def _unsigned(self, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """The numbers, (outputs, inputs) uint8; they are stored in two's complement."""
        pairs = read(self.numbers).view(torch.uint8)
        return torch.stack([pairs & 15, pairs >> 4], 2).flatten(1) ^ _ZERO


_Parts: TypeAlias = ScaledParts | Int4Parts


def weights_in(shards: Iterable[Shard], checkpoint: Path) -> tuple[dict[str, _Parts], frozenset[str]]:
    """Return the quantised weights of files by their names, and the names of tensors that are no weights.

    Raises:
        CheckpointError: a tensor is missing or has another shape, or the metadata does not describe it.
        UnsupportedArchitectureError: the type of a weight is not supported.
    """
    weights: dict[str, _Parts] = {}
    spare: set[str] = set()
    shards = list(shards)
    tensors = {name: tensor for shard in shards for name, tensor in shard.tensors.items()}
    for name, text in ((name, text) for shard in shards for name, text in shard.metadata.items()):
        module, dot, last = name.rpartition(".")
        if not dot:  # no name of a tensor
            continue
        try:
            told = msgspec.json.decode(text, type=_Told)
            if told.type == "Tensor":
                continue
            parts = {part: f"{module}._{last}_{part}" for part in told.parts}
            weights[name] = _parts_of(told, parts, tensors)
        except (msgspec.MsgspecError, _ShapeError) as error:
            raise CheckpointError(
                f"{checkpoint}: {name} is damaged: {error}; are its files of one checkpoint?"
            ) from error
        except UnsupportedArchitectureError as error:
            raise UnsupportedArchitectureError(f"{checkpoint}: {name} {error}") from error
        spare.update(parts.values())
    if unknown := [name for name in tensors if name.endswith(f"_{_NUMBERS}") and name not in spare]:
        raise CheckpointError(
            f"{checkpoint}: the metadata of the file does not say what {unknown[0]} is: expected torchao's "
            "_type and block_size; save it with transformers, or with torchao's flatten_tensor_state_dict"
        )
    return weights, frozenset(spare)


class _ShapeError(Exception):
    """The tensors of a matrix do not fit its metadata."""


def _parts_of(told: _Told, names: Mapping[str, str], tensors: Mapping[str, TensorInfo]) -> _Parts:
    """The tensors of one matrix, which have these names in the files.

    Raises:
        _ShapeError, msgspec.MsgspecError: they do not fit `told`.
        UnsupportedArchitectureError: it is of a type that is not supported.
    """
    if told.type not in _DTYPES:
        raise UnsupportedArchitectureError(
            f"is a {told.type}, which is not served: expected {', '.join(_DTYPES)} (of Int4WeightOnlyConfig "
            "with int4_packing_format='plain'), or the model's float weights"
        )
    if unknown := set(told.parts) - {_NUMBERS, _SCALE, _ZEROS} - _OF_ACTIVATIONS:
        raise UnsupportedArchitectureError(
            f"has {', '.join(sorted(unknown))}, which is not served: expected the model's float weights"
        )
    if missing := set(names.values()) - tensors.keys():
        raise _ShapeError(f"the files lack {', '.join(sorted(missing))}")
    found = {part: tensors[names[part]] for part in told.parts if part not in _OF_ACTIVATIONS}
    wanted = {_NUMBERS, _SCALE} | ({_ZEROS} if told.type == _TWO_A_BYTE else set())
    if not wanted <= found.keys():
        raise _ShapeError(f"it has {sorted(found)}, expected {sorted(wanted)}")
    numbers = found[_NUMBERS]
    if len(numbers.shape) != 2:
        raise UnsupportedArchitectureError(
            f"has {len(numbers.shape)} axes, which is not served: expected a matrix for each linear layer, "
            "or the model's float weights"
        )
    attributes = msgspec.json.decode(told.attributes, type=_Attributes)
    each = 2 if told.type == _TWO_A_BYTE else 1
    shape = numbers.shape[0], numbers.shape[1] * each
    high, wide = (min(size, most) for size, most in zip(attributes.block_size, shape, strict=True))
    if not all(shape) or numbers.dtype not in _DTYPES[told.type] or (each == 2 and high != 1):
        raise _ShapeError(
            f"its numbers are {numbers.dtype}{list(numbers.shape)} in blocks of {high} x {wide}, expected a "
            f"matrix of {' or '.join(sorted(_DTYPES[told.type]))}"
        )
    down, across = ceil(shape[0] / high), ceil(shape[1] / wide)
    for part in found.keys() - {_NUMBERS}:
        table = found[part]
        is_expected = (
            table.shape == (across, down) if each == 2 else table.elements == down * across
        ) and table.dtype in (_FLOATS if part == _SCALE or each == 2 else _FLOATS | {"I8"})
        if not is_expected:
            raise _ShapeError(
                f"its {part} is {table.dtype}{list(table.shape)}, expected one for each {high} x {wide} of "
                f"{shape[0]} x {shape[1]}"
            )
    if each == 2:
        return Int4Parts(names[_NUMBERS], names[_SCALE], names[_ZEROS], shape, wide)
    return ScaledParts(
        names[_NUMBERS],
        names[_SCALE],
        names[_ZEROS] if _ZEROS in found else None,
        shape,
        (high, wide),
        bits=_bits_of(attributes) if numbers.dtype == "I8" else None,
        is_e4m3=numbers.dtype == "F8_E4M3",
    )


def _bits_of(attributes: _Attributes) -> int:
    """The bits of integers that have a byte each: 8 unless the type says another number."""
    name = attributes.target_dtype.name if attributes.target_dtype is not None else "int8"
    bits = name.removeprefix("int")
    if not (bits.isdecimal() and 1 <= int(bits) <= 8):
        raise UnsupportedArchitectureError(f"has numbers of {name}: expected int1 to int8")
    return int(bits)
