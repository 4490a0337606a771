"""Triton kernels for the operations between a decoder's matrix products and its attention; and one product.

    add_rms_norm       adds a layer's output to the states, and normalises them for the next product
    rotate_and_store   splits the qkv product; normalises heads (some models), rotates queries and keys to
                       their positions, and writes keys and values to their slots of the pool
    silu_and_mul       silu(gate) * up
    row_product        a product of one row, with the norm before it, and the activation or addition after it

Transformers' modules take some fifty launches per layer for these, and a launch costs as much as reading
megabytes of weights. Sums and products are in float32 and rounded to the states' dtype once. Triton's
interpreter runs the kernels on a CPU (`workers.kv_engine.attention.triton`).
"""

import torch
import triton
import triton.language as tl

from workers.kv_engine.attention.triton import device_guard


def add_rms_norm(
    states: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Add `added` to (T, C) `states` in place, and return their RMS norm with (C,) `weight`."""
    tokens, width = states.shape
    normed = torch.empty_like(states)
    with device_guard(states):
        _add_rms_norm[(tokens,)](
            states,
            states if added is None else added,
            weight,
            normed,
            eps,
            width=width,
            width_ceil=triton.next_power_of_2(width),
            is_added=added is not None,
            num_warps=8,
        )
    return normed


def rotate_and_store(
    product: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> torch.Tensor:
    """Return the rotated queries (T, H, D); write rotated keys, and values, to their slots of the pool.

    Args:
        product: (T, (H + 2K) * D), queries, keys and values of each token.
        norms: weights (D,) of the RMS norms of each query head and key head; None if the model has none.
        eps: of these norms.
        cos: (T, D), for each token's position; the halves of a head are rotated against each other.
        sin: (T, D), likewise.
        slots: (T,) int32, the slot of each token.
        keys: (slots, K, D), the layer's keys in the pool.
        values: (slots, K, D), the layer's values.
    """
    tokens = product.shape[0]
    _, kv_heads, dim = keys.shape
    heads = product.shape[1] // dim - 2 * kv_heads
    queries = torch.empty((tokens, heads, dim), dtype=product.dtype, device=product.device)
    of_queries, of_keys = norms or (product, product)
    with device_guard(product):
        _rotate_and_store[(tokens, heads + 2 * kv_heads)](
            product,
            of_queries,
            of_keys,
            eps,
            cos,
            sin,
            slots,
            queries,
            keys,
            values,
            heads=heads,
            kv_heads=kv_heads,
            half=dim // 2,
            half_ceil=triton.next_power_of_2(dim // 2),
            is_normed=norms is not None,
            num_warps=1,
        )
    return queries


def silu_and_mul(product: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up, (T, C), of (T, 2C); the gates are first."""
    tokens, width = product.shape[0], product.shape[1] // 2
    out = torch.empty((tokens, width), dtype=product.dtype, device=product.device)
    with device_guard(product):
        _silu_and_mul[(tokens, triton.cdiv(width, _SILU_TILE))](product, out, width=width, tile=_SILU_TILE)
    return out


_SILU_TILE = 1024


def row_product(
    states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    norm: tuple[torch.Tensor, float] | None = None,
    is_gated: bool = False,
    added_to: torch.Tensor | None = None,
    tile: tuple[int, int] = (8, 512),
    warps: int = 4,
) -> torch.Tensor:
    """Return the product of one row, (1, C), and (N, C) weights: (1, N).

    Sums are in float32. cuBLAS computes a row as a tile of a matrix: on an H200 it reads small weights at
    little more than half of the memory's bandwidth. What a decoder does before and after a product is part
    of the launch.

    Args:
        states: the row.
        weight: contiguous.
        bias: (N,), added.
        norm: multiply the RMS norm of the row, with these weights (C,) and epsilon.
        is_gated: return silu(gate) * up, (1, N / 2); the first half of the weights are the gates'.
        added_to: add the product to this row, (1, N), in place, and return it.
        tile: the numbers of outputs and of states that a program computes at a time, powers of two.
        warps: of a program.
    """
    outs, width = weight.shape
    outs = outs // 2 if is_gated else outs
    out = added_to
    if out is None:
        out = torch.empty((1, outs), dtype=states.dtype, device=states.device)
    scale, eps = norm or (weight, 0.0)
    with device_guard(states):
        _row_product[(triton.cdiv(outs, tile[0]),)](
            out,
            states,
            weight,
            weight if bias is None else bias,
            scale,
            eps,
            outs=outs,
            width=width,
            has_bias=bias is not None,
            is_normed=norm is not None,
            is_gated=is_gated,
            is_added=added_to is not None,
            tile_outs=tile[0],
            tile_width=min(tile[1], triton.next_power_of_2(width)),
            num_warps=warps,
        )
    return out


# ---- the kernels -----------------------------------------------------------------------------------


@triton.jit  # type: ignore[untyped-decorator] # triton has no types
def _add_rms_norm(
    states: tl.tensor,
    added: tl.tensor,
    weight: tl.tensor,
    normed: tl.tensor,
    eps: tl.tensor,
    width: tl.constexpr,
    width_ceil: tl.constexpr,
    is_added: tl.constexpr,
) -> None:
    place = tl.arange(0, width_ceil)
    is_place = place < width
    at = tl.program_id(0).to(tl.int64) * width + place
    state = tl.load(states + at, mask=is_place, other=0.0)
    if is_added:
        more = tl.load(added + at, mask=is_place, other=0.0)
        state = (state.to(tl.float32) + more.to(tl.float32)).to(states.dtype.element_ty)
        tl.store(states + at, state, mask=is_place)
    exact = state.to(tl.float32)
    scaled = exact * tl.rsqrt(tl.sum(exact * exact, 0) / width + eps)
    by = tl.load(weight + place, mask=is_place, other=0.0).to(tl.float32)
    tl.store(normed + at, (scaled * by).to(normed.dtype.element_ty), mask=is_place)


@triton.jit  # type: ignore[untyped-decorator] # triton has no types
def _rotate_and_store(
    product: tl.tensor,
    of_queries: tl.tensor,
    of_keys: tl.tensor,
    eps: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    slots: tl.tensor,
    queries: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    half: tl.constexpr,
    half_ceil: tl.constexpr,
    is_normed: tl.constexpr,
) -> None:
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dim: tl.constexpr = 2 * half
    place = tl.arange(0, half_ceil)
    is_place = place < half
    read = product + (token * (heads + 2 * kv_heads) + head) * dim + place
    low = tl.load(read, mask=is_place, other=0.0).to(tl.float32)
    high = tl.load(read + half, mask=is_place, other=0.0).to(tl.float32)
    cell = tl.load(slots + token).to(tl.int64) * kv_heads
    if head >= heads + kv_heads:
        write = values + (cell + head - heads - kv_heads) * dim + place
        tl.store(write, low.to(values.dtype.element_ty), mask=is_place)
        tl.store(write + half, high.to(values.dtype.element_ty), mask=is_place)
        return
    is_query = head < heads
    if is_normed:
        by = of_queries if is_query else of_keys
        scale = tl.rsqrt((tl.sum(low * low, 0) + tl.sum(high * high, 0)) / dim + eps)
        low *= scale * tl.load(by + place, mask=is_place, other=0.0).to(tl.float32)
        high *= scale * tl.load(by + half + place, mask=is_place, other=0.0).to(tl.float32)
    turn = token * dim + place
    cos_low = tl.load(cos + turn, mask=is_place, other=0.0).to(tl.float32)
    cos_high = tl.load(cos + turn + half, mask=is_place, other=0.0).to(tl.float32)
    sin_low = tl.load(sin + turn, mask=is_place, other=0.0).to(tl.float32)
    sin_high = tl.load(sin + turn + half, mask=is_place, other=0.0).to(tl.float32)
    turned_low = (low * cos_low - high * sin_low).to(queries.dtype.element_ty)
    turned_high = (high * cos_high + low * sin_high).to(queries.dtype.element_ty)
    if is_query:
        write = queries + (token * heads + head) * dim + place
    else:
        write = keys + (cell + head - heads) * dim + place
    tl.store(write, turned_low, mask=is_place)
    tl.store(write + half, turned_high, mask=is_place)


@triton.jit  # type: ignore[untyped-decorator] # triton has no types
def _silu_and_mul(product: tl.tensor, out: tl.tensor, width: tl.constexpr, tile: tl.constexpr) -> None:
    token = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * tile + tl.arange(0, tile)
    is_place = place < width
    gate = tl.load(product + token * 2 * width + place, mask=is_place, other=0.0).to(tl.float32)
    up = tl.load(product + (token * 2 + 1) * width + place, mask=is_place, other=0.0).to(tl.float32)
    tl.store(
        out + token * width + place, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=is_place
    )


@triton.jit  # type: ignore[untyped-decorator] # triton has no types
def _sums(
    states: tl.tensor,
    weight: tl.tensor,
    scale: tl.tensor,
    eps: tl.tensor,
    at: tl.tensor,
    outs: tl.constexpr,
    width: tl.constexpr,
    is_normed: tl.constexpr,
    tile_width: tl.constexpr,
) -> tl.tensor:
    """The products of the row, or of its norm, and the weights of the outputs `at`."""
    is_out = at < outs
    sums = tl.zeros((at.shape[0], tile_width), tl.float32)
    squares = tl.zeros((tile_width,), tl.float32)
    for start in range(0, width, tile_width):
        place = start + tl.arange(0, tile_width)
        is_place = place < width
        by = tl.load(
            weight + at.to(tl.int64)[:, None] * width + place[None, :],
            mask=is_out[:, None] & is_place[None, :],
            other=0.0,
            eviction_policy="evict_first",
        )
        state = tl.load(states + place, mask=is_place, other=0.0).to(tl.float32)
        if is_normed:
            squares += state * state
            state *= tl.load(scale + place, mask=is_place, other=0.0).to(tl.float32)
        sums += by.to(tl.float32) * state[None, :]
    found = tl.sum(sums, 1)
    if is_normed:
        found *= tl.rsqrt(tl.sum(squares, 0) / width + eps)
    return found


@triton.jit  # type: ignore[untyped-decorator] # triton has no types
def _row_product(
    out: tl.tensor,
    states: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    scale: tl.tensor,
    eps: tl.tensor,
    outs: tl.constexpr,
    width: tl.constexpr,
    has_bias: tl.constexpr,
    is_normed: tl.constexpr,
    is_gated: tl.constexpr,
    is_added: tl.constexpr,
    tile_outs: tl.constexpr,
    tile_width: tl.constexpr,
) -> None:
    at = tl.program_id(0) * tile_outs + tl.arange(0, tile_outs)
    found = _sums(states, weight, scale, eps, at, outs, width, is_normed, tile_width)
    if has_bias:
        found += tl.load(bias + at, mask=at < outs, other=0.0).to(tl.float32)
    if is_gated:
        ups = weight + outs * width
        up = _sums(states, ups, scale, eps, at, outs, width, is_normed, tile_width)
        found = found * tl.sigmoid(found) * up
    if is_added:
        # Rounded before the addition, too, as a product of its own would be.
        found = found.to(out.dtype.element_ty).to(tl.float32)
        found += tl.load(out + at, mask=at < outs, other=0.0).to(tl.float32)
    tl.store(out + at, found.to(out.dtype.element_ty), mask=at < outs)
