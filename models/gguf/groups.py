"""The blocks of a GGUF file as weights in groups of 32 (`models.grouped_weights`).

    Q4_0, Q5_0, Q8_0    scale * (number - zero)
    Q4_1, Q5_1          scale * number + minimum
    Q4_K, Q5_K          the same: blocks of 256, whose eight scales and minimums are integers of six bits,
                        times one float each
    IQ4_NL, MXFP4       scale * value, that the number chooses from a table
    IQ4_XS              the same: blocks of 256, whose eight scales are integers of six bits, times one float
    IQ3_S, IQ3_XXS,     the same: the values are those of a code book, with their signs; the scales are
    IQ2_XXS             integers of four bits, times one float for 256
    IQ2_S, IQ2_XS       the same, with a scale per sixteen weights
    Q6_K, Q3_K          scale * (number - zero), with a scale per sixteen weights: integers of eight or six
                        bits, times one float for 256

Others are rounded to eight bits (`models.grouped_weights.rounded`).

Source: the block structures of llama.cpp's `ggml-common.h`.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import gguf
import torch
from gguf import GGMLQuantizationType as Type

from models.grouped_weights import GROUP, GroupedWeight, rounded
from models.transformers_lm import mxfp4

_SCALES_OF_K: Final = 8
"""Groups of a block of 256."""
_VALUES: Final = 16
"""Of a table that numbers of four bits choose from."""
_IQ2_VALUES: Final = (-43, -25, -8, 8, 25, 43)
_IQ4_VALUES: Final = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def grouped(tensor: Any) -> GroupedWeight:
    """Return a quantised matrix of a file, outputs first."""
    blocks = _BLOCKS.get(tensor.tensor_type)
    outputs = int(tensor.shape[1])
    if blocks is None:
        return rounded(torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy()))
    size = gguf.GGML_QUANT_SIZES[tensor.tensor_type][1]
    data = torch.from_numpy(tensor.data.copy()).reshape(outputs, -1, size)
    return blocks(data)


def _q4_0(blocks: torch.Tensor) -> GroupedWeight:
    return GroupedWeight(4, _nibbles(blocks[..., 2:]), _half(blocks, 0))


def _q4_1(blocks: torch.Tensor) -> GroupedWeight:
    return GroupedWeight(4, _nibbles(blocks[..., 4:]), _half(blocks, 0), _half(blocks, 2))


def _q5_0(blocks: torch.Tensor) -> GroupedWeight:
    numbers = _nibbles(blocks[..., 6:]) + _fifth_bits(blocks[..., 2:6])
    return GroupedWeight(5, numbers, _half(blocks, 0))


def _q5_1(blocks: torch.Tensor) -> GroupedWeight:
    numbers = _nibbles(blocks[..., 8:]) + _fifth_bits(blocks[..., 4:8])
    return GroupedWeight(5, numbers, _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: torch.Tensor) -> GroupedWeight:
    numbers = blocks[..., 2:].contiguous() ^ 128  # of signed bytes: plus 128
    return GroupedWeight(8, numbers.flatten(1), _half(blocks, 0))


def _q4_k(blocks: torch.Tensor) -> GroupedWeight:
    return GroupedWeight(4, _nibbles_of_k(blocks[..., 16:]), *_scales_of_k(blocks))


def _q5_k(blocks: torch.Tensor) -> GroupedWeight:
    high = blocks[..., None, 16:48] >> torch.arange(_SCALES_OF_K, dtype=torch.uint8)[:, None] & 1
    numbers = _nibbles_of_k(blocks[..., 48:]) + (high << 4).flatten(1)
    return GroupedWeight(5, numbers, *_scales_of_k(blocks))


def _q6_k(blocks: torch.Tensor) -> GroupedWeight:
    """Of 128 weights 64 bytes have the low four bits, and 32 bytes the high two of every 32nd weight."""
    low = blocks[..., :128].reshape(*blocks.shape[:2], 2, 2, 32)
    high = blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 1, 32)
    high = high >> torch.arange(0, 8, 2, dtype=torch.uint8)[:, None] & 3
    numbers = torch.cat([low & 15, low >> 4], -2) | high << 4
    scales = blocks[..., 192:208].contiguous().view(torch.int8) * _half(blocks, 208)[..., None]
    return GroupedWeight(6, numbers.flatten(1), scales.flatten(1))


def _q3_k(blocks: torch.Tensor) -> GroupedWeight:
    """Of 128 weights 32 bytes have the low two bits; of all, a bit of 32 bytes is unset if it is 4 less.

    Eight bytes have the low four bits of the sixteen scales, four bytes behind them their high two bits.
    """
    pairs = torch.arange(0, 8, 2, dtype=torch.uint8)
    low = blocks[..., 32:96].unflatten(-1, (2, 1, 32)) >> pairs[:, None] & 3  # type: ignore[no-untyped-call]
    places = torch.arange(8, dtype=torch.uint8)
    is_plain = blocks[..., None, :32] >> places[:, None] & 1
    numbers = low.flatten(-3) + 4 * is_plain.flatten(-2) + 4  # 4 less, and the zero is 8
    of_low = blocks[..., None, 96:104] >> torch.tensor([[0], [4]], dtype=torch.uint8) & 15
    of_high = blocks[..., None, 104:108] >> pairs[:, None] & 3
    scales = (of_low.flatten(-2) | of_high.flatten(-2) << 4).float() - 32
    return GroupedWeight(4, numbers.flatten(1), (scales * _half(blocks, 108)[..., None]).flatten(1))


def _iq4_nl(blocks: torch.Tensor) -> GroupedWeight:
    return GroupedWeight(4, _nibbles(blocks[..., 2:]), _half(blocks, 0), values=_IQ4_VALUES)


def _iq4_xs(blocks: torch.Tensor) -> GroupedWeight:
    """Four bytes have the low four bits of the eight scales, two bytes before them their high two bits."""
    low = _pairs(blocks[..., 4:8])
    pairs = torch.arange(0, 8, 2, dtype=torch.uint8)
    high = (blocks[..., 2:4, None] >> pairs & 3).flatten(-2)
    scales = (low | high << 4).to(torch.int32) - 32
    runs = blocks[..., 8:].unflatten(-1, (_SCALES_OF_K, GROUP // 2))  # type: ignore[no-untyped-call] # torch's own
    return GroupedWeight(
        4,
        torch.cat([runs & 15, runs >> 4], -1).flatten(1),
        (scales * _half(blocks, 0)[..., None]).flatten(1),
        values=_IQ4_VALUES,
    )


def _from_code_book(
    kind: Type, values: Sequence[int], scales_of: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[torch.Tensor], GroupedWeight]:
    """Return what reads blocks that begin with a float16, the factor of all their scales.

    Args:
        kind: their type.
        values: those that its code book and signs make, ascending.
        scales_of: returns the scales of blocks without that factor, (outputs, blocks, scales of a block).
    """
    table = (*values, *[0] * (_VALUES - len(values)))
    known = torch.tensor(values, dtype=torch.float32)
    between = (known[1:] + known[:-1]) / 2

    def read(blocks: torch.Tensor) -> GroupedWeight:
        plain, scales = blocks.clone(), scales_of(blocks)
        plain[..., :2] = torch.tensor([1.0], dtype=torch.float16).view(torch.uint8)
        floats = torch.from_numpy(gguf.dequantize(plain.flatten(1).numpy(), kind))
        groups = floats.view(*scales.shape, -1)
        numbers = torch.bucketize(groups / scales[..., None], between).to(torch.uint8)
        factors = _half(blocks, 0)[..., None]
        return GroupedWeight(4, numbers.flatten(1), (scales * factors).flatten(1), values=table)

    return read


def _iq3_s_scales(blocks: torch.Tensor) -> torch.Tensor:
    return 1 + 2 * _pairs(blocks[..., 106:110]).float()


def _iq3_xxs_scales(blocks: torch.Tensor) -> torch.Tensor:
    return (0.5 + (blocks[..., 69:98:4] >> 4).float()) * 0.5


def _iq2_xxs_scales(blocks: torch.Tensor) -> torch.Tensor:
    return (0.5 + (blocks[..., 9:66:8] >> 4).float()) * 0.25


def _iq2_xs_scales(blocks: torch.Tensor) -> torch.Tensor:
    return _quarters(blocks[..., 66:74])


def _iq2_s_scales(blocks: torch.Tensor) -> torch.Tensor:
    return _quarters(blocks[..., 74:82])


def _quarters(packed: torch.Tensor) -> torch.Tensor:
    return (0.5 + _pairs(packed).float()) * 0.25


def _signed(values: Sequence[int]) -> list[int]:
    return sorted([*values, *(-value for value in values)])


def _mxfp4(blocks: torch.Tensor) -> GroupedWeight:
    return GroupedWeight(
        4, _nibbles(blocks[..., 1:]), mxfp4.scales_of(blocks[..., 0]) * mxfp4.UNIT, values=mxfp4.VALUES
    )


_BLOCKS: Final[Mapping[Any, Callable[[torch.Tensor], GroupedWeight]]] = MappingProxyType(
    {
        Type.Q4_0: _q4_0,
        Type.Q4_1: _q4_1,
        Type.Q5_0: _q5_0,
        Type.Q5_1: _q5_1,
        Type.Q8_0: _q8_0,
        Type.Q4_K: _q4_k,
        Type.Q5_K: _q5_k,
        Type.Q3_K: _q3_k,
        Type.Q6_K: _q6_k,
        Type.IQ4_NL: _iq4_nl,
        Type.IQ4_XS: _iq4_xs,
        Type.IQ3_S: _from_code_book(Type.IQ3_S, _signed(range(1, 16, 2)), _iq3_s_scales),
        Type.IQ3_XXS: _from_code_book(
            Type.IQ3_XXS, _signed((4, 12, 20, 28, 36, 44, 52, 62)), _iq3_xxs_scales
        ),
        Type.IQ2_XXS: _from_code_book(Type.IQ2_XXS, _IQ2_VALUES, _iq2_xxs_scales),
        Type.IQ2_XS: _from_code_book(Type.IQ2_XS, _IQ2_VALUES, _iq2_xs_scales),
        Type.IQ2_S: _from_code_book(Type.IQ2_S, _IQ2_VALUES, _iq2_s_scales),
        Type.MXFP4: _mxfp4,
    }
)
"""From blocks of bytes, (outputs, blocks, bytes)."""


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The float16 at a place of each block, (outputs, blocks) float32."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16)[..., 0].float()


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Numbers of four bits: of each block first all low halves of its bytes, then all high ones."""
    return torch.cat([packed & 15, packed >> 4], -1).flatten(1)


def _pairs(packed: torch.Tensor) -> torch.Tensor:
    """The two numbers of four bits in each byte, beside each other, the low one first."""
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


def _nibbles_of_k(packed: torch.Tensor) -> torch.Tensor:
    """The same, for each 32 bytes of a block of 256."""
    runs = packed.unflatten(-1, (4, GROUP))  # type: ignore[no-untyped-call] # torch's own
    return torch.cat([runs & 15, runs >> 4], -1).flatten(1)


def _fifth_bits(packed: torch.Tensor) -> torch.Tensor:
    """The fifth bits of a block's numbers, in place."""
    each = packed[..., None] >> torch.arange(8, dtype=torch.uint8) & 1
    return (each << 4).flatten(1)


def _scales_of_k(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The scales and minimums of a block of 256, (outputs, 8 * blocks) float32.

    Twelve bytes have the low six bits of the first four scales, of the first four minimums, and the low four
    bits of the others; their high two bits are in the high bits of the first eight bytes.
    """
    first, second, rest = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat([first & 63, rest & 15 | first >> 6 << 4], -1)
    minimums = torch.cat([second & 63, rest >> 4 | second >> 6 << 4], -1)
    by_scale, by_minimum = (_half(blocks, at)[..., None] for at in (0, 2))
    return (scales * by_scale).flatten(1), (minimums * -by_minimum).flatten(1)
