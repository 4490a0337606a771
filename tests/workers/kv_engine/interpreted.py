"""Runs kernels in Triton's interpreter, in its own process: `python -m tests.workers.kv_engine.interpreted`.

The interpreter must be enabled before Triton is imported, and transformers imports Triton in every test
process. The process prints its results as one line of JSON.
"""

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from types import SimpleNamespace
from typing import Any, Final
from unittest.mock import patch

import torch

from tests.tiny import Family
from workers.kv_engine.attention.kernels import AttentionKernel
from workers.kv_engine.step import Spans


@dataclass(frozen=True, kw_only=True)
class Case:
    """Spans of (queries, keys) over scattered blocks, and how they attend; 2 KV heads."""

    shapes: tuple[tuple[int, int], ...]
    block_size: int = 16
    group: int = 4
    dim: int = 64
    window: int | None = None
    softcap: float | None = None
    parts: int | None = None
    split_keys: int = 16
    dtype: torch.dtype = torch.float32  # bfloat16 is beyond the interpreter: its products are of the bits


DECODES: Final = ((1, 5), (1, 80), (1, 1))
MIXED: Final = ((1, 40), (20, 50), (1, 3), (11, 11), (2, 70))
CASES: Final[dict[str, Case]] = {
    **{f"decodes, {group} heads share keys": Case(shapes=DECODES, group=group) for group in (1, 2, 3, 4, 7)},
    **{f"prompts, {group} heads share keys": Case(shapes=MIXED, group=group) for group in (1, 2, 3, 7)},
    **{f"decodes, blocks of {size}": Case(shapes=DECODES, block_size=size) for size in (8, 64)},
    **{f"prompts, blocks of {size}": Case(shapes=MIXED, block_size=size) for size in (8, 64)},
    **{f"decodes, heads of {dim}": Case(shapes=DECODES, dim=dim) for dim in (8, 80, 96, 128)},
    **{f"prompts, heads of {dim}": Case(shapes=MIXED, dim=dim) for dim in (80, 128)},
    **{f"decodes, window of {width}": Case(shapes=DECODES, window=width) for width in (1, 24, 1000)},
    "decodes in parts, window": Case(shapes=DECODES, window=60, parts=3, group=2),
    "prompts, window": Case(shapes=MIXED, window=30),
    "decodes, softcap": Case(shapes=DECODES, softcap=3.0, parts=2, group=3),
    "prompts, softcap": Case(shapes=MIXED, softcap=3.0, window=50),
    "decodes in float16": Case(shapes=DECODES, dtype=torch.float16, parts=2),
    "prompts in float16": Case(shapes=MIXED, dtype=torch.float16),
    "decodes in as many parts as there are": Case(shapes=((1, 2100),), parts=32, group=2),
    "a long decode in parts, beside short ones in one": Case(
        shapes=(*DECODES, (1, 700)), parts=4, split_keys=128
    ),
}
SCALING: Final = 0.3
DECODERS: Final[dict[str, Family]] = {
    "heads are normalised": "qwen3",
    "biases, a window in some layers": "qwen2_window",
}


def made(case: Case) -> tuple[Any, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A step of the case, queries, and a pool's keys and values; unused slots hold NaN."""
    generator = torch.Generator().manual_seed(0)
    spans, most = len(case.shapes), max(-(-keys // case.block_size) for _, keys in case.shapes)
    counts = torch.tensor([queries for queries, _ in case.shapes])
    step = SimpleNamespace(
        rows=torch.randperm(spans, generator=generator).int(),
        query_offsets=torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).int(),
        kv_lengths=torch.tensor([keys for _, keys in case.shapes]).int(),
        block_table=torch.randperm(spans * most, generator=generator).int().view(spans, most),
    )
    step.spans = Spans(
        query_offsets=step.query_offsets.numpy(),
        kv_lengths=step.kv_lengths.numpy(),
        block_tables=step.block_table[step.rows.long()].numpy(),
        block_size=case.block_size,
    )
    cells = (spans * most * case.block_size, 2, case.dim)
    queries = torch.randn(2 * case.group, int(counts.sum()), case.dim, generator=generator).transpose(0, 1)
    keys, values = (torch.randn(cells, generator=generator) for _ in range(2))
    used = torch.cat([_cells(step, n) for n in range(spans)])
    unused = torch.ones(cells[0], dtype=torch.bool).index_fill(0, used, value=False)
    keys[unused] = values[unused] = torch.nan
    return step, queries.to(case.dtype), keys.to(case.dtype), values.to(case.dtype)


def _cells(step: Any, span: int) -> torch.Tensor:
    places = torch.arange(int(step.kv_lengths[span]))
    size = int(step.spans.block_size)
    blocks: torch.Tensor = step.block_table[step.rows[span].long()].long()
    return blocks[places // size] * size + places % size


def expected(
    case: Case, step: Any, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """The definition, written out, span by span."""
    out = []
    for n, (count, length) in enumerate(case.shapes):
        k, v = (of[_cells(step, n)].repeat_interleave(case.group, 1).float() for of in (keys, values))
        asked = queries[step.query_offsets[n] : step.query_offsets[n + 1]].float()
        scores = torch.einsum("qhd,khd->hqk", asked, k) * SCALING
        if case.softcap is not None:
            scores = torch.tanh(scores / case.softcap) * case.softcap
        position, key = torch.arange(length - count, length)[:, None], torch.arange(length)
        is_seen = (key <= position) & (key > position - (case.window or length))
        weights = scores.masked_fill(~is_seen, -torch.inf).softmax(-1)
        out.append(torch.einsum("hqk,khd->qhd", weights, v))
    return torch.cat(out)


def errors() -> dict[str, float]:
    """The largest error of the kernel against the definition, by case."""
    from workers.kv_engine.attention.triton import attend  # noqa: PLC0415 - only where it is interpreted

    found: dict[str, float] = {}
    for name, case in CASES.items():
        step, queries, keys, values = made(case)
        how: dict[str, Any] = {"window": case.window, "softcap": case.softcap}
        how |= {"parts": case.parts, "split_keys": case.split_keys}
        out = attend(queries, keys, values, step, scaling=SCALING, **how)
        found[name] = float((out - expected(case, step, queries, keys, values)).abs().max())
    return found


def replays() -> dict[str, Any]:
    """Answers of engines whose decodes are compared with their recording, and of one with torch only."""
    from models.decoder_lm.nodes import load  # noqa: PLC0415 - takes seconds
    from tests.tiny import tiny_checkpoint  # noqa: PLC0415
    from tests.workers.kv_engine.engines import make_engine  # noqa: PLC0415
    from tests.workers.kv_engine.oracle import ids, run  # noqa: PLC0415
    from tests.workers.kv_engine.recorder import SameLaunches  # noqa: PLC0415
    from workers.kv_engine.attention.triton import attend  # noqa: PLC0415 - only where it is interpreted
    from workers.kv_engine.gpu import decoder  # noqa: PLC0415 - only where it is interpreted
    from workers.kv_engine.gpu.prompt_graphs import PromptGraphs  # noqa: PLC0415 - likewise
    from workers.kv_engine.sequence_spec import Sampling, SequenceSpec  # noqa: PLC0415

    node, recorder = load(tiny_checkpoint("qwen3")), SameLaunches()
    prompts: list[tuple[int, int]] = []
    forward = PromptGraphs.forward

    def counted(self: PromptGraphs, size: int, tokens: int) -> torch.Tensor:
        prompts.append((size, tokens))
        return forward(self, size, tokens)

    samplings = (Sampling(), Sampling(temperature=1, top_p=0.9, seed=2), Sampling(temperature=1, seed=1))
    specs = [
        SequenceSpec(key=str(n), prompt_ids=list(range(n, 12 * n + 2)), max_tokens=5 + n, sampling=sampling)
        for n, sampling in enumerate(samplings)
    ]

    def answers(node: Any, capture: SameLaunches | None) -> dict[str, list[int]]:
        engine = make_engine(
            node, num_blocks=32, block_size=4, max_step_tokens=32, max_sequences=2, capture=capture
        )
        return {key: ids(outputs) for key, outputs in run(engine, specs, every=2).items()}

    found: dict[str, Any] = {"expected": answers(node, None)}
    with ExitStack() as stack:
        stack.enter_context(_as_on_a_gpu(recorder.watched(attend)))
        stack.enter_context(patch.object(PromptGraphs, "forward", counted))
        for module, name in _launches():
            watched = recorder.watched(getattr(module, name))
            stack.enter_context(patch.object(module, name, watched))
        found["modules"] = answers(node, recorder)
        found["kernels"] = answers(decoder.fuse(node), recorder)
    # Of the last engine: bodies of two rows and of one, each before three samplers; two sizes of prompts.
    of_two, *_, of_one, _, _, _, _, _ = recorder.launches[-10:]
    sizes = {"layers": node.layout.layers, "two_rows": of_two, "one_row": of_one}
    return {**found, **sizes, "replays": recorder.replays, "prompts": sorted(set(prompts))}


def decoders() -> dict[str, float]:
    """Errors of the fused layers against transformers', in standard deviations of the logits."""
    from models.decoder_lm.nodes import load  # noqa: PLC0415 - takes seconds
    from tests.tiny import tiny_checkpoint  # noqa: PLC0415
    from workers.kv_engine import selfcheck  # noqa: PLC0415
    from workers.kv_engine.attention import paged  # noqa: PLC0415
    from workers.kv_engine.attention.triton import attend  # noqa: PLC0415 - only where it is interpreted
    from workers.kv_engine.gpu.decoder import fuse  # noqa: PLC0415 - only where it is interpreted

    found: dict[str, float] = {}
    for name, family in DECODERS.items():
        node: Any = load(tiny_checkpoint(family))
        node.use_attention(paged.ATTENTION)
        ids = [(7919 * (place + 1)) % node.vocab_size for place in range(selfcheck._CUTS[-1])]
        with torch.inference_mode(), _as_on_a_gpu(attend):
            by_kernels = fuse(node)
            assert by_kernels is not node
            expected = by_kernels.reference(torch.tensor(ids))
            error = (selfcheck._paged_logits(by_kernels, ids) - expected).abs().max() / expected.std()
        found[name] = float(error)
    return found


def shared_decoder() -> dict[str, Any]:
    """Answers of two engines that share fused layers, with recorded steps, and those of `generate`."""
    from tests.workers.kv_engine.oracle import clear_text, ids, run  # noqa: PLC0415 - takes seconds
    from tests.workers.kv_engine.recorder import Again  # noqa: PLC0415
    from tests.workers.kv_engine.shared_node import parts, shared  # noqa: PLC0415
    from workers.kv_engine.attention.triton import attend  # noqa: PLC0415 - only where it is interpreted
    from workers.kv_engine.gpu import decoder  # noqa: PLC0415 - only where it is interpreted
    from workers.kv_engine.sequence_spec import SequenceSpec  # noqa: PLC0415

    interpreter = Lock()

    def one_at_a_time(kernel: Any) -> Any:
        def launched(*args: Any, **kwargs: Any) -> torch.Tensor:
            with interpreter:
                out: torch.Tensor = kernel(*args, **kwargs)
                return out

        return launched

    leader, follower = Again(), Again()
    sizes = {"num_blocks": 32, "block_size": 4, "max_step_tokens": 32, "max_sequences": 2}
    texts, expected = zip(*(clear_text("qwen3", length, 8) for length in (6, 30)), strict=True)
    specs = [SequenceSpec(key=str(n), prompt_ids=text, max_tokens=8) for n, text in enumerate(texts)]
    with ExitStack() as stack:
        stack.enter_context(_as_on_a_gpu(one_at_a_time(attend)))
        for module, name in _launches():
            stack.enter_context(patch.object(module, name, one_at_a_time(getattr(module, name))))
        halves: Any = [decoder.fuse(part) for part in parts("qwen3")]
        recorders = {"capture": leader, "follower_capture": follower}
        engines = stack.enter_context(shared(halves, sizes | recorders))
        found = run(engines.leader, specs, every=2)
        forwards = engines.leader.forwards
    return {
        "expected": list(expected),
        "found": [ids(found[spec.key]) for spec in specs],
        "kernels": [half.kernels for half in halves],
        "forwards": forwards,
        "replays": follower.replays,
    }


def products() -> dict[str, float]:
    """The largest error of products of one row against float64, relative to the largest result."""
    from torch.nn.functional import silu  # noqa: PLC0415 - only where it is interpreted

    from workers.kv_engine.gpu.triton_layers import row_product  # noqa: PLC0415 - likewise

    found: dict[str, float] = {}
    generator = torch.Generator().manual_seed(0)
    for outs, width in ((96, 64), (10, 200), (33, 1000)):
        row, scale = torch.randn(1, width, generator=generator), torch.randn(width, generator=generator)
        weight = torch.randn(2 * outs, width, generator=generator)
        bias, more = torch.randn(2 * outs, generator=generator), torch.randn(1, 2 * outs, generator=generator)
        exact = row.double()
        normed = exact * (exact.square().mean() + 1e-3).rsqrt() * scale
        plain, of_norm = exact @ weight.T.double(), normed @ weight.T.double()
        gated = silu(of_norm[:, :outs]) * of_norm[:, outs:]
        norm = (scale, 1e-3)
        for name, got, expected in (
            ("plain", row_product(row, weight, tile=(8, 128)), plain),
            ("bias", row_product(row, weight, bias, norm=norm, tile=(8, 128)), of_norm + bias),
            ("gated", row_product(row, weight, norm=norm, is_gated=True, tile=(8, 128)), gated),
            ("added", row_product(row, weight, added_to=more.clone(), tile=(8, 128)), plain + more),
        ):
            found[f"{name}, {outs} x {width}"] = float((got - expected).abs().max() / expected.abs().max())
    return found


def few_bits() -> dict[str, float]:
    """The largest error of products of matrices of few bits, relative to the largest result."""
    from torch.nn.functional import silu  # noqa: PLC0415 - only where it is interpreted

    from tests.workers.kv_engine.gpu.few_bits_cases import CASES, case  # noqa: PLC0415 - likewise
    from workers.kv_engine.gpu.few_bits import packed  # noqa: PLC0415 - likewise
    from workers.kv_engine.gpu.matrices import FewBitsMatrix, Scratch  # noqa: PLC0415 - likewise
    from workers.kv_engine.gpu.triton_few_bits import dequantised  # noqa: PLC0415 - likewise

    found: dict[str, float] = {}
    device, generator = torch.device("cpu"), torch.Generator().manual_seed(0)
    for name, (outs, width) in product(CASES, ((70, 96), (18, 1120))):
        weight = case(name, outs, width)
        matrix = packed([weight], device, torch.float32)
        bias, more = torch.randn(outs, generator=generator), torch.randn(1, outs, generator=generator)
        rows = torch.randn(130, width, generator=generator)
        scratch = Scratch(device, torch.float32)
        plain, biased = (FewBitsMatrix([matrix], one, scratch) for one in (None, bias))
        exact, row = weight.floats().double(), rows[:1]
        scale = torch.rand(width, generator=generator) / weight.floats().norm(dim=1).max()
        normed = row.double() * (row.double().square().mean() + 1e-3).rsqrt() * scale
        gate, up = torch.split(normed @ exact.T, outs // 2, 1)
        products, norm = rows.double() @ exact.T + bias, (scale, 1e-3)
        for what, got, expected in (
            ("weights", dequantised(matrix, torch.empty(outs * width), start=0, count=outs), exact),
            ("some weights", dequantised(matrix, torch.empty(outs * width), start=3, count=7), exact[3:10]),
            ("a row", plain.row_product(row), products[:1] - bias),
            ("a row, added", biased.row_product(row, added_to=more.clone()), products[:1] + more),
            ("a row, gated", plain.row_product(row, norm=norm, is_gated=True), silu(gate) * up),
            ("some rows", biased.products(rows[:19]), products[:19]),
            ("many rows", biased.products(rows), products),
        ):
            found[f"{name}, {outs} x {width}, {what}"] = float(
                (got - expected).abs().max() / expected.abs().max()
            )
    return found


def stacked_few_bits() -> dict[str, float]:
    """Errors of matrices of two kinds as one, whose floats are made a few outputs at a time."""
    from torch.nn.functional import silu  # noqa: PLC0415 - only where it is interpreted

    from tests.workers.kv_engine.gpu.few_bits_cases import case  # noqa: PLC0415 - likewise
    from workers.kv_engine.gpu import matrices  # noqa: PLC0415 - likewise

    generator = torch.Generator().manual_seed(0)
    weights = [case("4 with minimums", 40), case("6 in halves", 40), case("6 in halves", 30)]
    exact = torch.cat([weight.floats() for weight in weights]).double()
    bias = torch.randn(110, generator=generator)
    rows = torch.randn(130, 96, generator=generator)
    products = rows.double() @ exact.T + bias
    more = torch.randn(1, 110, generator=generator)
    norm = (torch.rand(96, generator=generator) / exact.norm(dim=1).max().float(), 0.0)
    normed = rows[:1].double() * rows[:1].double().square().mean().rsqrt() * norm[0]
    gate, up = torch.split(normed @ exact[:80].T, 40, 1)
    with patch.object(matrices, "_MOST_FLOATS", 7 * 96):
        maker = matrices.MatrixMaker(torch.device("cpu"), torch.float32)
        matrix, pair = maker.stacked(weights, bias), maker.stacked(weights[:2])
        maker.use_scratch()
        found = {
            "many rows": (matrix.products(rows), products),
            "some rows": (matrix.products(rows[:19]), products[:19]),
            "a row": (matrix.row_product(rows[:1], added_to=more.clone()), products[:1] + more),
            "gated": (pair.row_product(rows[:1], norm=norm, is_gated=True), silu(gate) * up),
        }
    return {what: float((got - want).abs().max() / want.abs().max()) for what, (got, want) in found.items()}


def few_bits_decoders() -> dict[str, dict[str, float]]:
    """Errors of models of few bits against transformers', whose weights were in the files until then.

    They are in standard deviations of the logits: of layers of the same weights, and of those of floats.
    """
    from models.transformers_lm import loader  # noqa: PLC0415 - takes seconds
    from tests.models.transformers_lm import quantised_checkpoints as published  # noqa: PLC0415
    from tests.tiny import tiny_checkpoint  # noqa: PLC0415
    from workers.kv_engine import selfcheck  # noqa: PLC0415
    from workers.kv_engine.attention import paged  # noqa: PLC0415
    from workers.kv_engine.attention.triton import attend  # noqa: PLC0415 - only where it is interpreted
    from workers.kv_engine.gpu.decoder import fuse  # noqa: PLC0415 - only where it is interpreted
    from workers.kv_engine.quantisation.wanted import Quantisation  # noqa: PLC0415 - likewise

    found: dict[str, dict[str, float]] = {}
    with TemporaryDirectory() as folder:

        def written(name: str, config: Any, store: Any) -> tuple[Path, Path]:
            place = Path(folder, name)
            place.mkdir()
            return published.quantised(place, config, store)

        stored = {
            name: written(name, config, store)
            for name, (config, store) in {
                "AWQ": (published.AWQ, published.awq),
                "GPTQ": (published.GPTQ, published.gptq()),
                "NF4": (published.NF4_CONFIG, published.four_bits(is_nested=False)),
                "FP8": ({"quant_method": "fbgemm_fp8"}, published.float8_by_rows),
            }.items()
        }
        plain = {name: tiny_checkpoint(name) for name in ("qwen3", "qwen2_window")}
        wanted = {
            **{f"{name} as stored": (*pair, Quantisation()) for name, pair in stored.items()},
            "int4": (plain["qwen3"], plain["qwen3"], Quantisation(bits=4)),
            "int8 with biases": (plain["qwen2_window"], plain["qwen2_window"], Quantisation(bits=8)),
            "fp8": (plain["qwen3"], plain["qwen3"], Quantisation(bits=8, is_float=True)),
            "int4 of AWQ": (*stored["AWQ"], Quantisation(bits=4, calibration=tuple(range(5, 40)))),
        }
        for name, (of_floats, checkpoint, quantisation) in wanted.items():
            stock = loader.load_decoder(of_floats, "llm", dtype="float32")
            with patch.object(loader, "_has_gpu_kernels", lambda _: True):
                node: Any = loader.load_decoder(checkpoint, "llm", dtype="float32", leaves_weights=True)
            left = sum(not any(parameter.stride()) for parameter in node.model.parameters())
            node.use_attention(paged.ATTENTION)
            text = selfcheck.text_for(node)
            with torch.inference_mode(), _as_on_a_gpu(attend):
                by_kernels: Any = fuse(node, quantisation)
                logits = selfcheck._paged_logits(by_kernels, text.tolist())
                expected, floats = by_kernels.reference(text), stock.reference(text)
            found[name] = {
                "left": left,
                "in memory": sum(one.numel() for one in node.model.parameters() if one.ndim > 1),
                "own": float((logits - expected).abs().max() / expected.std()),
                "floats": float((logits - floats).abs().max() / floats.std()),
            }
    return found


def samplers() -> dict[str, int]:
    """Of rows with all kinds of sampling and logits, how many there are, and how many tokens are torch's."""
    from tests.workers.kv_engine.sampling.test_sampler import rows  # noqa: PLC0415 - imports pytest
    from workers.kv_engine.gpu.triton_sampler import sample_rows  # noqa: PLC0415 - only where interpreted
    from workers.kv_engine.sampling.sampler import node_key, sample  # noqa: PLC0415 - here only
    from workers.kv_engine.sequence_spec import Sampling  # noqa: PLC0415 - here only

    chosen = random.Random(0)
    found = {"rows": 0, "alike": 0, "different": 0}
    for number, scale in enumerate((0.01, 1.0, 3.0, 10.0) * 2):
        generator = torch.Generator().manual_seed(number)
        logits = torch.randn(10, chosen.choice([7, 300, 1000]), generator=generator) * scale
        logits[0, 3] = torch.nan
        logits[1] = -torch.inf
        logits[2, 2] = torch.inf
        logits[3, ::2] = -torch.inf
        logits[4] = logits[4].round()  # equal ones
        samplings = [
            Sampling(
                temperature=chosen.choice([0, 0.3, 1.0, 2.0]),
                top_p=chosen.choice([1.0, 0.999, 0.9, 0.5]),
                top_k=chosen.choice([0, 0, 1, 5, 50, 2000]),
                min_p=chosen.choice([0.0, 0.0, 0.001, 0.1]),
                seed=chosen.randrange(2**62),
            )
            for _ in logits
        ]
        step = rows(samplings, [chosen.randrange(1000) for _ in logits])
        node = node_key("llm") if number % 2 else 5
        expected = sample(logits, step, node)
        tokens = sample_rows(logits, step, node, listed=chosen.choice([16, 64]), tile=256)
        found["rows"] += len(logits)
        found["alike"] += int((tokens == expected).sum())
        found["different"] += len(set(expected.tolist()))
    return found


def device_checks() -> dict[str, str]:
    """The messages of the checks at the start, for the kernels and for ones that are wrong."""
    from workers.kv_engine.attention.triton import attend  # noqa: PLC0415 - only where it is interpreted
    from workers.kv_engine.gpu import kernel_checks as checks  # noqa: PLC0415 - likewise
    from workers.kv_engine.gpu.triton_layers import row_product  # noqa: PLC0415 - likewise
    from workers.kv_engine.gpu.triton_sampler import sample_rows  # noqa: PLC0415 - likewise

    def said(**changes: Any) -> str:
        checks.check_kernels.cache_clear()
        with patch.multiple(checks, **changes):
            try:
                checks.check_kernels(torch.device("cpu"))
            except checks.KernelCheckError as error:
                return str(error)
        return ""

    return {
        "right": said(attend=attend),
        "products": said(row_product=lambda *given, **how: row_product(*given, **how) * 1.02),
        "attention": said(attend=lambda *given, parts: attend(*given, parts=parts) * 1.01),
        "sampler": said(sample_rows=lambda *given: sample_rows(*given).clamp(max=2000)),
        "few bits": _said_of_few_bits(1.0),
        "wrong few bits": _said_of_few_bits(1.05),
    }


def _said_of_few_bits(factor: float) -> str:
    """The message of the check for a matrix whose products of one row are wrong by a factor."""
    from tests.workers.kv_engine.gpu.few_bits_cases import case  # noqa: PLC0415 - only where interpreted
    from workers.kv_engine.gpu import kernel_checks, matrices  # noqa: PLC0415 - likewise
    from workers.kv_engine.gpu.triton_few_bits import few_bits_row  # noqa: PLC0415 - likewise

    maker = matrices.MatrixMaker(torch.device("cpu"), torch.float16)
    matrix: Any = maker.stacked([case("4"), case("6 in halves")])

    def changed(*given: Any, **how: Any) -> torch.Tensor:
        return few_bits_row(*given, **how).mul_(factor)

    with patch.object(matrices, "few_bits_row", changed):
        try:
            kernel_checks.check_few_bits([matrix])
        except kernel_checks.KernelCheckError as error:
            return str(error)
    return ""


def decode_times() -> list[float]:
    """Microseconds of a decode by stages: the interpreter knows none, but runs what a GPU would."""
    from workers.kv_engine.gpu.stages import MORE_STAGES, decode_us  # noqa: PLC0415 - only where interpreted

    keys, values = torch.zeros(2, 40, 2, 16)
    return [decode_us(keys, values, 4, stages=stages) for stages in (3, MORE_STAGES)]


def _launches() -> list[tuple[Any, str]]:
    """The modules and names by which fused layers launch kernels of floats."""
    from workers.kv_engine.gpu import decoder, matrices  # noqa: PLC0415 - only where it is interpreted

    return [
        *((decoder, name) for name in ("add_rms_norm", "rotate_and_store", "silu_and_mul")),
        (matrices, "row_product"),
    ]


@contextmanager
def _as_on_a_gpu(kernel: AttentionKernel) -> Iterator[None]:
    """Inside, new pools get this kernel as their device's default."""
    with patch("workers.kv_engine.attention.pool.kernel_for", lambda *_: kernel):
        yield


CHECKS: Final[dict[str, Callable[[], Any]]] = {
    "errors": errors,
    "replays": replays,
    "shared_decoder": shared_decoder,
    "decode_times": decode_times,
    "decoders": decoders,
    "few_bits": few_bits,
    "few_bits_decoders": few_bits_decoders,
    "stacked_few_bits": stacked_few_bits,
    "device_checks": device_checks,
    "products": products,
    "samplers": samplers,
}


def found() -> dict[str, Any]:
    """Run all checks in a process with Triton's interpreter, and return their results."""
    told = subprocess.run(
        (sys.executable, "-W", "error", "-m", "tests.workers.kv_engine.interpreted"),
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.returncode == 0, told.stderr
    findings: dict[str, Any] = json.loads(told.stdout)
    return findings


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps({name: check() for name, check in CHECKS.items()}))
