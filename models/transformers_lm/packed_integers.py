"""Integers of two, four or eight bits in words of 32 bits, with a scale per group of inputs.

    method, format                        words                    n numbers of a word
    gptq                                  (inputs / n, outputs)    of consecutive inputs
    awq                                   (inputs, outputs / n)    of outputs, in the order `_INTERLEAVED`
    compressed-tensors, pack-quantized    (outputs, inputs / n)    of consecutive inputs, with an offset

The first number is in the lowest bits. A weight is `(number - zero point) * scale`. Scales and zero points
are per group and output; zero points are packed along the outputs, and GPTQ's first format stores them less
one. `g_idx` has the group of each input, where groups are no consecutive inputs (GPTQ's `desc_act`).

Sources: the layers of AutoGPTQ (`QuantLinear`), AutoAWQ (`WQLinear_GEMM`) and compressed-tensors
(`pack_to_int32`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch

from models.checkpoints.files import CheckpointError
from models.checkpoints.weights import TensorInfo
from models.grouped_weights import GROUP, GroupedWeight, per_group

_WORD_BITS: Final = 32
_INTERLEAVED: Final = (0, 4, 1, 5, 2, 6, 3, 7)
"""AWQ: the place in a word of each of eight outputs."""
_FLOATS: Final = frozenset({"F32", "F16", "BF16"})


@dataclass(frozen=True, slots=True)
class _Layout:
    """The tensors of a method.

    Attributes:
        words, scale, zeros, groups: the ends of their names.
        has_inputs_first: matrices are (inputs, outputs), as scales are (groups, outputs).
        packs_inputs: the numbers of a word are those of several inputs, otherwise of outputs.
        order: the place in a word of each number.
    """

    words: str
    scale: str
    zeros: str
    groups: str
    has_inputs_first: bool
    packs_inputs: bool
    order: tuple[int, ...] | None = None

    @property
    def words_axis(self) -> int:
        """The axis of the matrix of words along which numbers are packed."""
        return 0 if self.packs_inputs == self.has_inputs_first else 1

    @property
    def zeros_axis(self) -> int:
        """That of the zero points, which are packed along the outputs."""
        return 1 if self.has_inputs_first else 0


LAYOUTS: Final[Mapping[str, _Layout]] = MappingProxyType(
    {
        "gptq": _Layout("qweight", "scales", "qzeros", "g_idx", has_inputs_first=True, packs_inputs=True),
        "awq": _Layout(
            "qweight", "scales", "qzeros", "g_idx", has_inputs_first=True, packs_inputs=False,
            order=_INTERLEAVED,
        ),
        "compressed-tensors": _Layout(
            "weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", has_inputs_first=False,
            packs_inputs=True,
        ),
    }
)  # fmt: skip
"""By the method."""


@dataclass(frozen=True, slots=True)
class PackedParts:
    """The tensors of one weight, by their names in the files.

    Attributes:
        shape: (outputs, inputs).
        group_size: consecutive inputs with one scale, unless there are `groups`.
        offset: the zero point of all numbers, if there are no `zeros`; otherwise what is added to those.
    """

    layout: _Layout
    bits: int
    words: str
    scale: str
    zeros: str | None
    groups: str | None
    shape: tuple[int, int]
    group_size: int
    offset: int

    @property
    def names(self) -> list[str]:
        return [name for name in (self.words, self.scale, self.zeros, self.groups) if name is not None]

    def floats(self, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """Return the weight, float32 of `shape`."""
        numbers, scale, zeros = self._read(read)
        weight = numbers.to(torch.float32, memory_format=torch.contiguous_format)
        group = self._group_of_inputs(read, scale.shape[1])
        weight -= zeros[:, group]
        weight *= scale[:, group]
        return weight

    def is_grouped(self, read: Callable[[str], torch.Tensor]) -> bool:
        """True if its groups are made of consecutive groups of 32."""
        count = ceil(self.shape[1] / self.group_size)
        if self.group_size % GROUP and count > 1:
            return False
        in_order = torch.arange(self.shape[1]) // self.group_size
        return torch.equal(self._group_of_inputs(read, count), in_order)

    def grouped(self, read: Callable[[str], torch.Tensor]) -> GroupedWeight:
        """Return the weight as it is stored."""
        numbers, scale, zeros = self._read(read)
        size = self.group_size if scale.shape[1] > 1 else self.shape[1]
        bits = max(self.bits, 4)
        scales, minimums = (per_group(part, size, self.shape[1]) for part in (scale, zeros * -scale))
        weight = GroupedWeight(bits, numbers.to(torch.uint8), scales, minimums)
        is_symmetric = bool((zeros == weight.zero).all())
        return replace(weight, minimums=None) if is_symmetric else weight

    def _read(self, read: Callable[[str], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The numbers (outputs, inputs), and of each group the scale and the zero point, float32."""
        layout, (outputs, inputs) = self.layout, self.shape
        numbers = unpacked(read(self.words), self.bits, layout.words_axis, layout.order)
        scale = read(self.scale).to(torch.float32)
        if self.zeros is None:
            zeros = torch.zeros_like(scale)
        else:
            zeros = unpacked(read(self.zeros), self.bits, layout.zeros_axis, layout.order).to(torch.float32)
        if layout.has_inputs_first:
            numbers, scale, zeros = numbers.T, scale.T, zeros.T
        return numbers[:outputs, :inputs], scale, zeros[:outputs] + self.offset

    def _group_of_inputs(self, read: Callable[[str], torch.Tensor], count: int) -> torch.Tensor:
        """The group of each input, int64."""
        if self.groups is not None:
            group = read(self.groups).to(torch.int64)
            if int(group.max()) >= count:
                raise CheckpointError(
                    f"{self.groups} names the group {int(group.max())}, expected less than {count}; "
                    "download it again"
                )
            if int(group.min()) >= 0:  # -1 everywhere: the inputs were not reordered
                return group
        return torch.arange(self.shape[1]) // self.group_size


def unpacked(words: torch.Tensor, bits: int, axis: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Return the numbers in a matrix of int32 words, int32; those of a word lie along `axis`."""
    places = torch.arange(_WORD_BITS // bits) if order is None else torch.tensor(order)
    shifts = (places * bits).to(torch.int32)
    shifts = shifts[:, None] if axis == 0 else shifts
    numbers = (words.unsqueeze(axis + 1) >> shifts) & (2**bits - 1)
    joined: torch.Tensor = numbers.flatten(axis, axis + 1)
    return joined


def packed_parts(
    name: str,
    tensors: Mapping[str, TensorInfo],
    config: Mapping[str, Any],
    bits: int,
    checkpoint: Path,
) -> PackedParts:
    """Return the tensors of the weight whose words have this name.

    Raises:
        CheckpointError: one of them is missing, or has the wrong type or shape.
    """
    method = config["quant_method"]
    layout, module = LAYOUTS[method], name.rpartition(".")[0]
    scale, zeros, groups = (f"{module}.{end}" for end in (layout.scale, layout.zeros, layout.groups))
    found = tensors.get(scale)
    words = tensors[name]
    if words.dtype != "I32" or len(words.shape) != 2 or found is None or found.dtype not in _FLOATS:
        raise CheckpointError(
            f"{checkpoint}: {name} is {words.dtype}{list(words.shape)}, expected a matrix of I32, and floats "
            f"in {scale}; are config.json and the weights of one checkpoint?"
        )
    each = _WORD_BITS // bits
    sizes = list(words.shape)
    sizes[layout.words_axis] *= each
    inputs, outputs = sizes if layout.has_inputs_first else sizes[::-1]
    scales = found.shape if layout.has_inputs_first else found.shape[::-1]
    count = scales[0] if scales else 0
    size = ceil(inputs / count) if count else 0
    size = next((one for one in group_sizes(config) if ceil(inputs / one) == count), size)
    parts = PackedParts(
        layout,
        bits,
        name,
        scale,
        zeros if zeros in tensors else None,
        groups if groups in tensors else None,
        (outputs, inputs),
        size,
        _offset(method, config, bits, has_zeros=zeros in tensors),
    )
    if not size or len(scales) != 2 or scales[1] != outputs or ceil(inputs / size) != count:
        raise CheckpointError(
            f"{checkpoint}: {scale} is {list(found.shape)}, expected a scale for each of {outputs} outputs "
            f"and of its groups of {inputs} inputs; are config.json and the weights of one checkpoint?"
        )
    expected = {parts.zeros: ("I32", ceil(outputs / each) * count), parts.groups: ("I32", inputs)}
    for part, (dtype, elements) in expected.items():
        if part is not None and (tensors[part].dtype, tensors[part].elements) != (dtype, elements):
            raise CheckpointError(
                f"{checkpoint}: {part} is {tensors[part].dtype}{list(tensors[part].shape)}, expected "
                f"{elements} of {dtype}; are config.json and the weights of one checkpoint?"
            )
    if method != "compressed-tensors" and parts.zeros is None:
        raise CheckpointError(f"{checkpoint}: {zeros} is missing: expected the zero points of {name}")
    return parts


def group_sizes(config: Mapping[str, Any]) -> list[int]:
    """Return the inputs of a group, as configured: several if the configuration has several."""
    groups = (config.get("config_groups") or {}).values()
    told = [(group.get("weights") or {}).get("group_size") for group in groups]
    told += [config.get("group_size"), config.get("q_group_size")]
    return [size for size in told if isinstance(size, int) and size > 0]


def _offset(method: str, config: Mapping[str, Any], bits: int, *, has_zeros: bool) -> int:
    if method == "compressed-tensors":  # numbers and zero points have the same offset
        return 0 if has_zeros else 2 ** (bits - 1)
    return 1 if method == "gptq" and config.get("checkpoint_format") != "gptq_v2" else 0
