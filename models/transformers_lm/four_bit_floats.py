"""bitsandbytes' weights of four bits (NF4 and FP4): an index into a table of sixteen floats.

    weight                                   bytes, two indices in each, the first in its higher half
    weight.quant_map                         the table, 16 floats
    weight.absmax                            a factor per block of consecutive numbers; or, of factors that
                                             are quantised themselves, an index into
    weight.nested_quant_map, .nested_absmax  a table of 256, and a factor per block of factors
    weight.quant_state.bitsandbytes__nf4     JSON, as bytes: shape, blocksize, nested_blocksize, nested_offset

Source: bitsandbytes, `QuantState.as_dict(packed=True)`; QLoRA (https://arxiv.org/abs/2305.14314).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil, prod
from pathlib import Path
from typing import Annotated, Final

import msgspec
import torch
from msgspec import Meta
from safetensors import safe_open

from models.checkpoints.files import CheckpointError
from models.checkpoints.weights import TensorInfo
from models.grouped_weights import GROUP, GroupedWeight, per_group

_STATES: Final = (".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4")
_Size = Annotated[int, Meta(ge=1)]


class _State(msgspec.Struct, frozen=True):
    shape: list[_Size]
    blocksize: _Size
    nested_blocksize: _Size | None = None
    nested_offset: float = 0.0


@dataclass(frozen=True, slots=True)
class FourBitParts:
    """The tensors of one weight; all their names begin with `weight`."""

    weight: str
    names: list[str]
    shape: tuple[int, ...]
    block: int
    nested_block: int | None
    nested_offset: float

    def floats(self, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """Return the weight, float32 of `shape`."""
        weight = self._table(read)[self._indices(read).long()]
        weight *= self._factors(read).repeat_interleave(self.block)[: weight.numel()]
        return weight.view(self.shape)

    def is_grouped(self, read: Callable[[str], torch.Tensor]) -> bool:
        """True if its blocks are made of groups of 32 inputs of one output."""
        is_within_rows = len(self.shape) == 2 and not self.shape[-1] % self.block and not self.block % GROUP
        return is_within_rows and bool(self._table(read).isfinite().all())

    def grouped(self, read: Callable[[str], torch.Tensor]) -> GroupedWeight:
        """Return the weight as it is stored."""
        outputs, inputs = self.shape
        scales = per_group(self._factors(read).view(outputs, -1), self.block, inputs)
        values = tuple(self._table(read).tolist())
        return GroupedWeight(4, self._indices(read).view(self.shape), scales, values=values)

    def _indices(self, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
        stored = read(self.weight).flatten()
        return torch.stack([stored >> 4, stored & 15], dim=-1).flatten()[: prod(self.shape)]

    def _table(self, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
        return read(f"{self.weight}.quant_map").to(torch.float32)

    def _factors(self, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """Of each block, float32."""
        factors = read(f"{self.weight}.absmax")
        if self.nested_block is not None:
            table = read(f"{self.weight}.nested_quant_map").to(torch.float32)
            nested = read(f"{self.weight}.nested_absmax").to(torch.float32)
            spread = nested.repeat_interleave(self.nested_block)[: factors.numel()]
            factors = table[factors.long()] * spread + self.nested_offset
        return factors.to(torch.float32)


def is_state(name: str) -> bool:
    """True for a tensor that describes another one."""
    return name.endswith(_STATES)


def four_bit_parts(
    state: str, tensors: Mapping[str, TensorInfo], path: Path, checkpoint: Path
) -> FourBitParts:
    """Return the tensors of the weight that is described by `state`, a tensor of the file `path`.

    Raises:
        CheckpointError: one of them is missing, or has the wrong type or size.
    """
    weight = state[: state.index(".quant_state.")]
    with safe_open(path, framework="pt", device="cpu") as file:
        try:
            told = msgspec.json.decode(file.get_tensor(state).numpy().tobytes(), type=_State)
        except (msgspec.MsgspecError, UnicodeError) as error:
            raise CheckpointError(
                f"{checkpoint}: {state} cannot be read: {error}; download it again"
            ) from error
    elements = prod(told.shape)
    blocks = ceil(elements / told.blocksize)
    wanted = {
        weight: ("U8", ceil(elements / 2)),
        f"{weight}.quant_map": ("F32", 16),
        f"{weight}.absmax": ("F32" if told.nested_blocksize is None else "U8", blocks),
    }
    if told.nested_blocksize is not None:
        wanted[f"{weight}.nested_quant_map"] = ("F32", 256)
        wanted[f"{weight}.nested_absmax"] = ("F32", ceil(blocks / told.nested_blocksize))
    for name, (dtype, count) in wanted.items():
        found = tensors.get(name)
        if found is None or (found.dtype, found.elements) != (dtype, count):
            what = "none" if found is None else f"{found.dtype}{list(found.shape)}"
            raise CheckpointError(
                f"{checkpoint}: expected {count} of {dtype} in {name}, found {what}; is {state} of this "
                "weight? Download the files again"
            )
    return FourBitParts(
        weight,
        [*wanted, state],
        tuple(told.shape),
        told.blocksize,
        told.nested_blocksize,
        told.nested_offset,
    )
