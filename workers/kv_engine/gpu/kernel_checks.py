"""Checks of the Triton kernels on the device itself, when an engine is made.

The tests run the kernels in Triton's interpreter, one program after the other. What only a GPU does is
checked here: programs that run at the same time and hand results to each other, and the compiled arithmetic.
The self-check of a node (`workers.kv_engine.selfcheck`) covers its layers, with few keys and no sampler.
"""

from collections.abc import Iterable
from functools import cache
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch.nn.functional import silu

from configs.deployment import ConfigError
from workers.kv_engine.attention.triton import attend
from workers.kv_engine.gpu.matrices import MOST_ROWS, FewBitsMatrix
from workers.kv_engine.gpu.triton_layers import row_product
from workers.kv_engine.gpu.triton_sampler import sample_rows
from workers.kv_engine.sampling.sampler import sample
from workers.kv_engine.sampling.sampling_rows import SamplingRows

_LENGTHS: Final = (1200, 7, 513)
_ROWS: Final = 42
_SPLITS: Final = 4
_TIMES: Final = 4
_MOST_ERROR: Final = 5e-3
_MOST_ERROR_OF_FEW_BITS: Final = 2e-2
"""Of products in bfloat16, whose weights were rounded to it or not."""
_LEAST: Final = 1e-30
_SOME_ROWS: Final = (2, 32, MOST_ROWS)
"""One for each tile of `few_bits_rows`."""
_MOST_OTHERS: Final = 2
"""Tokens that may differ from torch's: its exponential may have another last bit."""


class KernelCheckError(ConfigError):
    """A kernel gives wrong results on this device; the message names it. No restart helps."""


@cache
@torch.inference_mode()
def check_kernels(device: torch.device) -> None:
    """Compare split attention, products of one row and the sampler with torch, once per device.

    Raises:
        KernelCheckError: a result is wrong.
    """
    if (error := _attention_error(device)) > _MOST_ERROR:
        raise KernelCheckError(
            f"the Triton kernel of attention is wrong on {device} by {error:.3g} with split keys: expected "
            f"at most {_MOST_ERROR}; update the GPU's driver and torch, and report it"
        )
    if (error := _product_error(device)) > _MOST_ERROR:
        raise KernelCheckError(
            f"the Triton kernel of one row's products is wrong on {device} by {error:.3g}: expected at most "
            f"{_MOST_ERROR}; update the GPU's driver and torch, and report it"
        )
    if (others := _other_tokens(device)) > _MOST_OTHERS:
        raise KernelCheckError(
            f"the Triton sampler gives {others} of {_ROWS} tokens on {device} that torch does not, "
            f"expected at most {_MOST_OTHERS}; update the GPU's driver and torch, and report it"
        )


@torch.inference_mode()
def check_few_bits(matrices: Iterable[FewBitsMatrix]) -> None:
    """Compare products of one row, of some and of many, which are computed in three ways.

    So all kernels are compiled before they are needed. The self-check of a node compares its layers with
    torch's, for one row and for some.

    Raises:
        KernelCheckError: a result is wrong.
    """
    for matrix in matrices:
        if (error := _few_bits_error(matrix)) > _MOST_ERROR_OF_FEW_BITS:
            raise KernelCheckError(
                f"the Triton kernels of few bits differ by {error:.3g} for {matrix}: expected at most "
                f"{_MOST_ERROR_OF_FEW_BITS}; update the GPU's driver and torch, and report it; "
                "model_kwargs.quantize: none computes with floats"
            )


def _few_bits_error(matrix: FewBitsMatrix) -> float:
    """The largest difference of a product, relative to the largest one."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(MOST_ROWS + 1, matrix.inputs, generator=generator).to(matrix.device, matrix.dtype)
    many = matrix.products(states)[:1].float()
    others = [matrix.row_product(states[:1]), *(matrix.products(states[:rows])[:1] for rows in _SOME_ROWS)]
    if any(not torch.equal(other.isnan(), many.isnan()) for other in others):
        return float("inf")
    # Scales that are no numbers are told by the self-check, as those of a damaged file.
    error = torch.stack([(other - many).nan_to_num().abs().max() for other in others]).max()
    return float(error / many.nan_to_num().abs().max().clamp(min=_LEAST))


def _attention_error(device: torch.device) -> float:
    """The largest error of decodes whose keys are split, several times: a race may go well once."""
    heads, kv_heads, dim, size = 8, 2, 64, 16
    blocks = [-(-length // size) for length in _LENGTHS]
    generator = torch.Generator().manual_seed(0)
    table = torch.zeros(len(_LENGTHS), max(blocks), dtype=torch.int32)
    order = torch.randperm(sum(blocks), generator=generator).int()
    for row, own in enumerate(torch.split(order, blocks)):
        table[row, : len(own)] = own
    pool = torch.randn(2, sum(blocks) * size, kv_heads, dim, generator=generator)
    queries = torch.randn(len(_LENGTHS), heads, dim, generator=generator)
    expected = []
    for row, length in enumerate(_LENGTHS):
        places = torch.arange(length)
        cells = table[row, places // size].long() * size + places % size
        keys, values = (of[cells].repeat_interleave(heads // kv_heads, 1) for of in pool)
        weights = torch.einsum("hd,khd->hk", queries[row], keys).mul(dim**-0.5).softmax(-1)
        expected.append(torch.einsum("hk,khd->hd", weights, values))
    numbers = torch.arange(len(_LENGTHS) + 1, dtype=torch.int32, device=device)
    step: Any = SimpleNamespace(
        rows=numbers[:-1],
        query_offsets=numbers,
        kv_lengths=torch.tensor(_LENGTHS, dtype=torch.int32, device=device),
        block_table=table.to(device),
        spans=SimpleNamespace(block_size=size),
    )
    keys, values = pool.to(device)
    found = [attend(queries.to(device), keys, values, step, parts=_SPLITS).cpu() for _ in range(_TIMES)]
    error = (torch.stack(found) - torch.stack(expected)).abs().max()
    return float(error) if error.isfinite() else float("inf")


def _product_error(device: torch.device) -> float:
    """The largest relative error of the products of a layer of one row, against float64."""
    generator = torch.Generator().manual_seed(0)
    outs, width, eps = 300, 700, 1e-6
    row, scale, more = (torch.randn(n, generator=generator) for n in (width, width, outs))
    weight, bias = torch.randn(2 * outs, width, generator=generator), torch.randn(outs, generator=generator)
    exact = row.double()
    normed = exact * (exact.square().mean() + eps).rsqrt() * scale.double()
    gate, up = torch.split(weight.double() @ normed, outs)
    expected = [silu(gate) * up, weight[:outs].double() @ exact + bias + more]
    states, norm, by = row.to(device)[None], (scale.to(device), eps), weight.to(device)
    found = [
        row_product(states, by, norm=norm, is_gated=True),
        row_product(states, by[:outs], bias.to(device), added_to=more.to(device)[None]),
    ]
    errors = [
        (got.cpu() - want).abs().max() / want.abs().max() for got, want in zip(found, expected, strict=True)
    ]
    return max(float(error) if error.isfinite() else float("inf") for error in errors)


def _other_tokens(device: torch.device) -> int:
    """The number of tokens that torch samples otherwise, of rows with all filters."""
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(_ROWS, 4500, generator=generator) * 2).to(device)
    places = torch.arange(_ROWS, dtype=torch.int32, device=device)
    rows = SamplingRows(
        temperature=0.5 + places % 4 / 4,
        top_p=torch.where(places % 3 > 0, 0.8, 1.0),
        top_k=torch.where(places % 5 > 2, 50, 0).int(),
        min_p=torch.where(places % 7 > 5, 0.01, 0.0),
        seed_low=places,
        seed_high=places // 2,
        sample_index=places,
        draw_index=places,
        is_random=True,
        has_top_k=True,
        has_top_p=True,
        has_min_p=True,
        candidates=None,
    )
    return int((sample_rows(logits, rows, 7) != sample(logits, rows, 7)).sum())
