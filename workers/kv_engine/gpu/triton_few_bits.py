"""Triton kernels that multiply matrices of few bits (`few_bits.FewBits`); states and sums are floats.

    few_bits_row       a product of one row, with the norm before it, and the activation or addition after it
    few_bits_rows      products of some rows: weights become floats in registers, for the tensor cores
    dequantised        the weights as floats; for many rows, cuBLAS multiplies them faster than the others

A program reads pairs of inputs: input i of the first half of a group of 32, and input i of the second. In
numbers of four bits a pair is a byte. A row's products are added up by group, and multiplied by its scale
once. Triton's interpreter runs the kernels on a CPU (`workers.kv_engine.attention.triton`).
"""

import torch
import triton
import triton.language as tl

from workers.kv_engine.attention.triton import device_guard
from workers.kv_engine.gpu.few_bits import FewBits

_TILE_OF_FLOATS = 256
"""Pairs that a program of `dequantised` writes."""


def few_bits_row(
    states: torch.Tensor,
    weight: FewBits,
    bias: torch.Tensor | None = None,
    *,
    norm: tuple[torch.Tensor, float] | None = None,
    is_gated: bool = False,
    into: torch.Tensor | None = None,
    is_added: bool = False,
    tile: tuple[int, int] = (8, 256),
    warps: int = 4,
) -> torch.Tensor:
    """Return the product of one row, (1, k), and n x k weights: (1, n). Sums are in float32.

    Args:
        states: the row.
        weight: (n, k).
        bias: (n,), added.
        norm: multiply the RMS norm of the row, with these weights (k,) and epsilon.
        is_gated: return silu(gate) * up, (1, n / 2); the first half of the weights are the gates'.
        into: write to this row, (1, n), and return it.
        is_added: add the product to what `into` has.
        tile: the numbers of outputs and of pairs of inputs that a program computes at a time, powers of two.
        warps: of a program.
    """
    outs, width = weight.shape
    outs = outs // 2 if is_gated else outs
    out = torch.empty((1, outs), dtype=states.dtype, device=states.device) if into is None else into
    scale, eps = norm or (states, 0.0)
    pairs = _pairs_of(weight)
    with device_guard(states):
        _few_bits_row[(triton.cdiv(outs, tile[0]),)](
            out,
            states,
            *_tensors_of(weight, states),
            states if bias is None else bias,
            scale,
            eps,
            outs=outs,
            width=width,
            pairs=pairs,
            **_form_of(weight),
            has_bias=bias is not None,
            is_normed=norm is not None,
            is_gated=is_gated,
            is_added=is_added,
            tile_outs=tile[0],
            tile_pairs=min(tile[1], triton.next_power_of_2(pairs)),
            num_warps=warps,
        )
    return out


def few_bits_rows(
    states: torch.Tensor,
    weight: FewBits,
    bias: torch.Tensor | None = None,
    *,
    into: torch.Tensor | None = None,
    tile: tuple[int, int] = (64, 64),
    warps: int = 4,
    stages: int = 3,
) -> torch.Tensor:
    """Return the products of (T, k) states and n x k weights: (T, n).

    Args:
        states: rows, contiguous.
        weight: (n, k).
        bias: (n,), added.
        into: write to these rows, (T, n), whose outputs are contiguous, and return them.
        tile: the numbers of outputs and of pairs of inputs that a program computes at a time, powers of two.
        warps: of a program.
        stages: of the loads of its loop.
    """
    rows, (outs, width) = len(states), weight.shape
    out = torch.empty((rows, outs), dtype=states.dtype, device=states.device) if into is None else into
    tile_rows = min(64, max(16, triton.next_power_of_2(rows)))
    with device_guard(states):
        _few_bits_rows[(triton.cdiv(outs, tile[0]), triton.cdiv(rows, tile_rows))](
            out,
            states,
            *_tensors_of(weight, states),
            states if bias is None else bias,
            rows,
            out.stride(0),
            outs=outs,
            width=width,
            pairs=_pairs_of(weight),
            **_form_of(weight),
            has_bias=bias is not None,
            tile_outs=tile[0],
            tile_pairs=tile[1],
            tile_rows=tile_rows,
            num_warps=warps,
            num_stages=stages,
        )
    return out


def dequantised(weight: FewBits, into: torch.Tensor, *, start: int, count: int) -> torch.Tensor:
    """Write the weights of `count` outputs to the beginning of `into`, flat; return them, (count, k)."""
    width, pairs = weight.inputs, _pairs_of(weight)
    tile = min(_TILE_OF_FLOATS, triton.next_power_of_2(pairs))
    with device_guard(into):
        _dequantised[(count, triton.cdiv(pairs, tile))](
            *(into, start, *_tensors_of(weight, into)),
            width=width,
            pairs=pairs,
            **_form_of(weight),
            tile_pairs=tile,
        )
    return into[: count * width].view(count, width)


def _pairs_of(weight: FewBits) -> int:
    columns = weight.numbers.shape[1]
    return columns // 2 if weight.bits == 8 else columns


def _tensors_of(weight: FewBits, other: torch.Tensor) -> tuple[torch.Tensor | float, ...]:
    """The tensors of a matrix and their factor, with `other` in place of those that it has not."""
    upper, minimums, values = (
        other if tensor is None else tensor for tensor in (weight.upper, weight.minimums, weight.values)
    )
    # A float of eight bits is read as one of 16, whose exponent has another bias.
    factor = weight.factor * 256 if weight.is_float else weight.factor
    return weight.numbers, upper, weight.scales, minimums, values, factor


def _form_of(weight: FewBits) -> dict[str, int | bool]:
    has_minimums, has_values = weight.minimums is not None, weight.values is not None
    return {
        "tables": weight.scales.shape[1],
        "bits": weight.bits,
        "groups": weight.groups,
        "parts": weight.parts,
        "zero": 0 if has_minimums else 2 ** (weight.bits - 1),
        "has_minimums": has_minimums,
        "has_values": has_values,
        "is_float": weight.is_float,
    }


# ---- the kernels -----------------------------------------------------------------------------------


@triton.jit  # type: ignore[untyped-decorator] # triton has no types
def _numbers(
    numbers: tl.tensor,
    upper: tl.tensor,
    row: tl.tensor,
    pair: tl.tensor,
    is_read: tl.tensor,
    pairs: tl.constexpr,
    bits: tl.constexpr,
) -> tl.tensor:
    """The numbers of pairs of inputs of a row."""
    if bits == 8:
        at = row * (2 * pairs) + pair // 16 * 32 + pair % 16
        first = tl.load(numbers + at, mask=is_read, other=0, eviction_policy="evict_first")
        second = tl.load(numbers + at + 16, mask=is_read, other=0, eviction_policy="evict_first")
    else:
        byte = tl.load(numbers + row * pairs + pair, mask=is_read, other=0, eviction_policy="evict_first")
        first, second = byte & 15, byte >> 4
        if bits > 4:
            more: tl.constexpr = bits - 4
            shared: tl.constexpr = 4 // more  # pairs in a byte
            found = tl.load(upper + row * (pairs // shared) + pair // shared, mask=is_read, other=0)
            found = found >> ((pair % shared) * (2 * more)).to(tl.uint8)
            low: tl.constexpr = 2**more - 1
            first = first | ((found & low) << 4)
            second = second | (((found >> more) & low) << 4)
    return first, second


@triton.jit  # type: ignore[untyped-decorator] # triton has no types
def _floats(
    number: tl.tensor,
    values: tl.tensor,
    bits: tl.constexpr,
    zero: tl.constexpr,
    has_values: tl.constexpr,
    is_float: tl.constexpr,
) -> tl.tensor:
    """The values of numbers, float32, without the scale; and the excess that is to be subtracted from them.

    A float of eight bits that is NaN is taken for 480: the self-check finds it, whose reference has NaN.

    A conversion of integers takes longer than to set the bits of floats.
    """
    if has_values:
        found, excess = tl.load(values + number), 0.0
    elif is_float:  # the bits of a float16 that is smaller by 2**8
        half = number.to(tl.uint16)
        half = ((half & 128) << 8) | ((half & 127) << 7)
        found, excess = half.to(tl.float16, bitcast=True).to(tl.float32), 0.0
    elif bits == 8:  # of one between 1024 and 2048
        half = (number.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True)
        found, excess = half.to(tl.float32) - (1024.0 + zero), 0.0
    else:  # of one between 128 and 256
        whole = (number.to(tl.uint32) << 16) | 0x43000000
        found, excess = whole.to(tl.float32, bitcast=True), 128.0 + zero
    return found, excess


@triton.jit  # type: ignore[untyped-decorator] # triton has no types
def _states(
    states: tl.tensor,
    scale: tl.tensor,
    place: tl.tensor,
    width: tl.constexpr,
    is_normed: tl.constexpr,
) -> tl.tensor:
    """States of a row, multiplied by the weights of its norm, and their squares."""
    is_place = place < width
    state = tl.load(states + place, mask=is_place, other=0.0).to(tl.float32)
    square = state * state
    if is_normed:
        state *= tl.load(scale + place, mask=is_place, other=0.0).to(tl.float32)
    return state, square


@triton.jit  # type: ignore[untyped-decorator] # triton has no types
def _row_sums(
    states: tl.tensor,
    numbers: tl.tensor,
    upper: tl.tensor,
    scales: tl.tensor,
    minimums: tl.tensor,
    values: tl.tensor,
    factor: tl.tensor,
    scale: tl.tensor,
    eps: tl.tensor,
    at: tl.tensor,
    end: tl.constexpr,
    width: tl.constexpr,
    pairs: tl.constexpr,
    tables: tl.constexpr,
    bits: tl.constexpr,
    groups: tl.constexpr,
    parts: tl.constexpr,
    zero: tl.constexpr,
    has_minimums: tl.constexpr,
    has_values: tl.constexpr,
    is_float: tl.constexpr,
    is_normed: tl.constexpr,
    tile_pairs: tl.constexpr,
) -> tl.tensor:
    """The products of the row, or of its norm, and the weights of the outputs `at`, below `end`."""
    tile_outs: tl.constexpr = at.shape[0]
    tile_groups: tl.constexpr = tile_pairs // 16
    is_out = at < end
    row = at.to(tl.int64)[:, None]
    sums = tl.zeros((tile_outs, tile_groups), tl.float32)
    squares = tl.zeros((tile_pairs,), tl.float32)
    for start in range(0, pairs, tile_pairs):
        pair = start + tl.arange(0, tile_pairs)
        is_read = is_out[:, None] & (pair < pairs)[None, :]
        first, second = _numbers(numbers, upper, row, pair[None, :], is_read, pairs, bits)
        place = pair // 16 * 32 + pair % 16
        state, square = _states(states, scale, place, width, is_normed)
        other_state, other_square = _states(states, scale, place + 16, width, is_normed)
        if is_normed:
            squares += square + other_square
        one, excess = _floats(first, values, bits, zero, has_values, is_float)
        other, _ = _floats(second, values, bits, zero, has_values, is_float)
        product, other_product = one * state[None, :], other * other_state[None, :]
        total = tl.sum(tl.reshape(state, (tile_groups, 16)), 1)
        other_total = tl.sum(tl.reshape(other_state, (tile_groups, 16)), 1)
        group = start // 16 + tl.arange(0, tile_groups)
        is_group = is_out[:, None] & (group * 16 < pairs)[None, :]
        table = row * tables + (group * parts // groups)[None, :]
        by = tl.load(scales + table, mask=is_group, other=0.0).to(tl.float32)
        if parts == 2:
            by_other = tl.load(scales + table + 1, mask=is_group, other=0.0).to(tl.float32)
            part = tl.sum(tl.reshape(product, (tile_outs, tile_groups, 16)), 2)
            other_part = tl.sum(tl.reshape(other_product, (tile_outs, tile_groups, 16)), 2)
            sums += (part - excess * total[None, :]) * by
            sums += (other_part - excess * other_total[None, :]) * by_other
        else:
            part = tl.sum(tl.reshape(product + other_product, (tile_outs, tile_groups, 16)), 2)
            sums += (part - excess * (total + other_total)[None, :]) * by
        if has_minimums:
            least = tl.load(minimums + table, mask=is_group, other=0.0).to(tl.float32)
            sums += least * (total + other_total)[None, :]
    found = tl.sum(sums, 1) * factor
    if is_normed:
        found *= tl.rsqrt(tl.sum(squares, 0) / width + eps)
    return found


@triton.jit  # type: ignore[untyped-decorator] # triton has no types
def _few_bits_row(
    out: tl.tensor,
    states: tl.tensor,
    numbers: tl.tensor,
    upper: tl.tensor,
    scales: tl.tensor,
    minimums: tl.tensor,
    values: tl.tensor,
    factor: tl.tensor,
    bias: tl.tensor,
    scale: tl.tensor,
    eps: tl.tensor,
    outs: tl.constexpr,
    width: tl.constexpr,
    pairs: tl.constexpr,
    tables: tl.constexpr,
    bits: tl.constexpr,
    groups: tl.constexpr,
    parts: tl.constexpr,
    zero: tl.constexpr,
    has_minimums: tl.constexpr,
    has_values: tl.constexpr,
    is_float: tl.constexpr,
    has_bias: tl.constexpr,
    is_normed: tl.constexpr,
    is_gated: tl.constexpr,
    is_added: tl.constexpr,
    tile_outs: tl.constexpr,
    tile_pairs: tl.constexpr,
) -> None:
    at = tl.program_id(0) * tile_outs + tl.arange(0, tile_outs)
    found = _row_sums(
        *(states, numbers, upper, scales, minimums, values, factor, scale, eps, at, outs, width, pairs),
        *(tables, bits, groups, parts, zero, has_minimums, has_values, is_float, is_normed, tile_pairs),
    )
    if has_bias:
        found += tl.load(bias + at, mask=at < outs, other=0.0).to(tl.float32)
    if is_gated:
        up = _row_sums(
            *(states, numbers, upper, scales, minimums, values, factor, scale, eps, at + outs, 2 * outs),
            *(width, pairs, tables, bits, groups, parts, zero, has_minimums, has_values, is_float),
            *(is_normed, tile_pairs),
        )
        found = found * tl.sigmoid(found) * up
    if is_added:
        # Rounded before the addition, too, as a product of its own would be.
        found = found.to(out.dtype.element_ty).to(tl.float32)
        found += tl.load(out + at, mask=at < outs, other=0.0).to(tl.float32)
    tl.store(out + at, found.to(out.dtype.element_ty), mask=at < outs)


@triton.jit  # type: ignore[untyped-decorator] # triton has no types
def _weights(
    numbers: tl.tensor,
    upper: tl.tensor,
    scales: tl.tensor,
    minimums: tl.tensor,
    values: tl.tensor,
    factor: tl.tensor,
    row: tl.tensor,
    pair: tl.tensor,
    is_read: tl.tensor,
    pairs: tl.constexpr,
    tables: tl.constexpr,
    bits: tl.constexpr,
    groups: tl.constexpr,
    parts: tl.constexpr,
    zero: tl.constexpr,
    has_minimums: tl.constexpr,
    has_values: tl.constexpr,
    is_float: tl.constexpr,
) -> tl.tensor:
    """The weights of pairs of inputs, float32."""
    first, second = _numbers(numbers, upper, row, pair, is_read, pairs, bits)
    table = row * tables + pair // 16 * parts // groups
    by = tl.load(scales + table, mask=is_read, other=0.0).to(tl.float32) * factor
    by_other = by
    if parts == 2:
        by_other = tl.load(scales + table + 1, mask=is_read, other=0.0).to(tl.float32) * factor
    one, excess = _floats(first, values, bits, zero, has_values, is_float)
    other, _ = _floats(second, values, bits, zero, has_values, is_float)
    one, other = (one - excess) * by, (other - excess) * by_other
    if has_minimums:
        least = tl.load(minimums + table, mask=is_read, other=0.0).to(tl.float32) * factor
        one += least
        other += least
    return one, other


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator] # triton has no types
def _few_bits_rows(
    out: tl.tensor,
    states: tl.tensor,
    numbers: tl.tensor,
    upper: tl.tensor,
    scales: tl.tensor,
    minimums: tl.tensor,
    values: tl.tensor,
    factor: tl.tensor,
    bias: tl.tensor,
    rows: tl.tensor,
    stride: tl.tensor,
    outs: tl.constexpr,
    width: tl.constexpr,
    pairs: tl.constexpr,
    tables: tl.constexpr,
    bits: tl.constexpr,
    groups: tl.constexpr,
    parts: tl.constexpr,
    zero: tl.constexpr,
    has_minimums: tl.constexpr,
    has_values: tl.constexpr,
    is_float: tl.constexpr,
    has_bias: tl.constexpr,
    tile_outs: tl.constexpr,
    tile_pairs: tl.constexpr,
    tile_rows: tl.constexpr,
) -> None:
    at = tl.program_id(0) * tile_outs + tl.arange(0, tile_outs)
    token = tl.program_id(1) * tile_rows + tl.arange(0, tile_rows)
    is_out, is_token = at < outs, token < rows
    row = at.to(tl.int64)[:, None]
    sums = tl.zeros((tile_outs, tile_rows), tl.float32)
    for start in range(0, pairs, tile_pairs):
        pair = start + tl.arange(0, tile_pairs)
        is_read = is_out[:, None] & (pair < pairs)[None, :]
        one, other = _weights(
            *(numbers, upper, scales, minimums, values, factor, row, pair[None, :], is_read, pairs, tables),
            *(bits, groups, parts, zero, has_minimums, has_values, is_float),
        )
        place = (pair // 16 * 32 + pair % 16)[:, None]
        read = states + token.to(tl.int64)[None, :] * width + place
        state = tl.load(read, mask=is_token[None, :] & (place < width), other=0.0)
        other_state = tl.load(read + 16, mask=is_token[None, :] & (place + 16 < width), other=0.0)
        sums = tl.dot(one.to(states.dtype.element_ty), state, sums, input_precision="ieee")
        sums = tl.dot(other.to(states.dtype.element_ty), other_state, sums, input_precision="ieee")
    if has_bias:
        sums += tl.load(bias + at, mask=is_out, other=0.0).to(tl.float32)[:, None]
    write = out + token.to(tl.int64)[None, :] * stride + at[:, None]
    tl.store(write, sums.to(out.dtype.element_ty), mask=is_out[:, None] & is_token[None, :])


@triton.jit(do_not_specialize=["start"])  # type: ignore[untyped-decorator] # triton has no types
def _dequantised(
    into: tl.tensor,
    start: tl.tensor,
    numbers: tl.tensor,
    upper: tl.tensor,
    scales: tl.tensor,
    minimums: tl.tensor,
    values: tl.tensor,
    factor: tl.tensor,
    width: tl.constexpr,
    pairs: tl.constexpr,
    tables: tl.constexpr,
    bits: tl.constexpr,
    groups: tl.constexpr,
    parts: tl.constexpr,
    zero: tl.constexpr,
    has_minimums: tl.constexpr,
    has_values: tl.constexpr,
    is_float: tl.constexpr,
    tile_pairs: tl.constexpr,
) -> None:
    own = tl.program_id(0).to(tl.int64)
    row = start + own
    pair = tl.program_id(1) * tile_pairs + tl.arange(0, tile_pairs)
    is_read = pair < pairs
    one, other = _weights(
        *(numbers, upper, scales, minimums, values, factor, row, pair, is_read, pairs, tables),
        *(bits, groups, parts, zero, has_minimums, has_values, is_float),
    )
    place = pair // 16 * 32 + pair % 16
    write = into + own * width + place
    tl.store(write, one.to(into.dtype.element_ty), mask=place < width)
    tl.store(write + 16, other.to(into.dtype.element_ty), mask=place + 16 < width)
