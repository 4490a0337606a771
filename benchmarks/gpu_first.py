"""The first minutes on a GPU: short checks, in the order in which a failure makes the later ones pointless.

    python -m benchmarks gpu-first                     everything, within nine minutes
    python -m benchmarks gpu-first attention engines   some of it
    python -m benchmarks gpu-first --budget 240        begin nothing after four minutes

Each check says what its figures decide, prints at once and fails alone. The exit status is 1 if a check
failed, and 2 without a GPU. Nothing begins after eight minutes, or `--budget`. `python -m benchmarks gpu`
then compares with other engines.
"""

import argparse
import math
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle, product, repeat
from types import SimpleNamespace
from typing import Any, Final

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks import gpu
from benchmarks.machine import described
from models.base import KVLayout
from models.transformers_lm.node import DecoderLM
from tests.workers.kv_engine import interpreted
from workers.kv_engine.attention.kernels import default_kernel
from workers.kv_engine.engine import KVEngine
from workers.kv_engine.gpu.cuda_graphs import CudaCapture
from workers.kv_engine.gpu.fusion import use_gpu_kernels
from workers.kv_engine.gpu.host_reads import HostReadError
from workers.kv_engine.gpu.token_sampler import sample
from workers.kv_engine.outputs import TokenOutput
from workers.kv_engine.sampling.sampling_rows import SamplingRows
from workers.kv_engine.sequence_spec import Sampling, SequenceSpec

_SAMPLINGS: Final = {
    "greedy": Sampling(),
    "random": Sampling(temperature=1.0, seed=1),
    "filtered": Sampling(temperature=0.9, top_p=0.8, top_k=40, seed=2),
    "Orpheus": Sampling(temperature=0.6, top_p=0.8, repetition_penalty=1.3, seed=3),
}
_MOST_ERROR: Final = {torch.float32: 5e-3, torch.float16: 5e-3, torch.bfloat16: 3e-2}
_BUDGET_S: Final = 480.0
_L2_BYTES: Final = 400 << 20
"""Several times a GPU's cache."""


def main(options: Sequence[str] = ()) -> None:
    """Run the checks that are asked for, in their order."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks gpu-first")
    parser.add_argument("names", nargs="*", metavar="CHECK", help=f"of {', '.join(CHECKS)}; default: all")
    parser.add_argument("--budget", type=float, default=_BUDGET_S, metavar="SECONDS")
    asked = parser.parse_args(options)
    if unknown := sorted(set(asked.names) - CHECKS.keys()):
        parser.error(f"unknown {unknown}: expected some of {', '.join(CHECKS)}")
    if not torch.cuda.is_available():
        print("expected a GPU and torch with CUDA, found none: nothing was checked", file=sys.stderr)
        sys.exit(gpu.NO_GPU)
    names = [name for name in CHECKS if not asked.names or name in asked.names]
    if failed := run(names, torch.device("cuda", torch.cuda.current_device()), budget_s=asked.budget):
        print(f"failed: {', '.join(failed)}")
        sys.exit(1)


def run(names: Sequence[str], device: torch.device, *, budget_s: float = math.inf) -> list[str]:
    """Run checks; return the names of those that failed or were left out because the time was used up."""
    failed = []
    begun_s = time.perf_counter()
    for name in names:
        check_s = time.perf_counter()
        if check_s - begun_s > budget_s:
            print(f"== {name}: left out, the time is used up", flush=True)
            failed.append(name)
            continue
        print(f"== {name}: {CHECKS[name].__doc__}", flush=True)
        try:
            CHECKS[name](device)
            verdict = "done"
        except Exception:  # noqa: BLE001 - whatever fails, the others are checked
            traceback.print_exc(file=sys.stdout)
            verdict = "FAILED"
            failed.append(name)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        print(f"== {name}: {verdict} in {time.perf_counter() - check_s:.1f} s", flush=True)
    return failed


# ---- results --------------------------------------------------------------------------------------------


def environment(device: torch.device) -> None:
    """Versions, and what our kernels lack."""
    print(described())
    if device.type == "cuda":
        print(f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}")
        assert default_kernel("cuda") is not None, "expected the Triton kernels to run: see the warning above"


def attention(device: torch.device) -> None:
    """Every case of the interpreter's tests, and all in bfloat16, which the interpreter cannot compute."""
    from workers.kv_engine.attention.triton import attend  # noqa: PLC0415 - where there is Triton

    wrong = []
    dtypes = [torch.bfloat16] if device.type == "cuda" else []
    cases = {
        (name, dtype): case for name, case in interpreted.CASES.items() for dtype in (case.dtype, *dtypes)
    }
    for (name, dtype), case in cases.items():
        step, queries, keys, values = interpreted.made(replace(case, dtype=dtype))
        want = interpreted.expected(case, step, queries, keys, values)
        for field in ("rows", "query_offsets", "kv_lengths", "block_table"):
            setattr(step, field, getattr(step, field).to(device))
        found = attend(
            queries.to(device),
            keys.to(device),
            values.to(device),
            step,
            scaling=interpreted.SCALING,
            window=case.window,
            softcap=case.softcap,
            parts=case.parts,
            split_keys=case.split_keys,
        )
        error = float((found.cpu().float() - want).abs().max())
        if not error < _MOST_ERROR[dtype]:
            wrong.append(f"{name} in {dtype}: {error:.3g}")
    assert not wrong, f"expected the definition of attention, found errors of {wrong}"
    print(f"attention: {len(cases)} cases are right")


def engines(device: torch.device) -> None:
    """The same tokens launched ahead, read first, and without CUDA graphs, in float32."""
    node = _small(device)
    found = []
    for runs_ahead, is_recorded in ((True, True), (False, True), (False, False)):
        engine = _engine(node, 6, 512, is_recorded=is_recorded)
        engine.runs_ahead = runs_ahead
        tokens = _answers(engine, 12, 48)
        assert len({tuple(answer) for answer in tokens.values()}) > 9, "expected answers that differ"
        found.append(tokens)
    alike = [sum(found[0][key] == one[key] for key in found[0]) for one in found[1:]]
    print(f"engines: of {len(found[0])} answers {alike[0]} alike read first, {alike[1]} without CUDA graphs")
    assert min(alike) == len(found[0])


def failed_capture(device: torch.device) -> None:
    """A recording that reads on the host is refused, and the next one works."""
    if device.type != "cuda":
        return
    before = torch.cuda.current_stream(device)

    def reads() -> None:
        torch.ones(1, device=device).item()

    try:
        CudaCapture(device).capture(reads)
    except HostReadError as error:
        print(f"failed capture: said {str(error).splitlines()[0]!r}")
    else:
        raise AssertionError("expected a refusal of the read on the host")
    assert torch.cuda.current_stream(device) == before, "expected the stream of before"
    torch.cuda.empty_cache()
    numbers = torch.zeros(8, device=device)

    def count() -> None:
        numbers.add_(1)

    replay = CudaCapture(device).capture(count)
    replay()
    torch.cuda.synchronize(device)
    assert numbers.tolist() == [3.0] * 8, f"expected two warm-ups and a replay, found {numbers.tolist()}"


# ---- speeds of parts ------------------------------------------------------------------------------------


def products(device: torch.device) -> None:
    """Matrix products of Qwen3-8B; their bandwidth is the most that a decode can reach.

    Of one row, the fastest tile and warps decide the defaults of our `row_product`.
    """
    from workers.kv_engine.gpu.triton_layers import row_product  # noqa: PLC0415 - where there is Triton

    print(f"read {gpu.read_bytes_per_s(device) / 1e12:.2f} TB/s")
    for rows in (1, 16, 64):
        for out, width in ((6144, 4096), (4096, 4096), (24_576, 4096), (4096, 12_288), (151_936, 4096)):
            count = max(2, _L2_BYTES // (2 * out * width))
            weights = cycle(
                [torch.randn(out, width, device=device, dtype=torch.bfloat16) for _ in range(count)]
            )
            states = torch.randn(rows, width, device=device, dtype=torch.bfloat16)
            took_us = _recorded_us(device, partial(_multiply, states, weights))
            said = f"{took_us:.1f} us, {_rate(2 * out * width, took_us)}"
            if rows == 1:
                weight = next(weights)
                error = (row_product(states, weight) - states @ weight.T).abs().max()
                assert error < 0.02 * width**0.5, f"expected cuBLAS' product, found an error of {error:.3g}"
                for tile, warps in _ROW_TILES:
                    own = partial(_multiply_row, row_product, states, weights, tile, warps)
                    own_us = _recorded_us(device, own)
                    said += f"; {tile[0]} x {tile[1]}, {warps}: {own_us:.1f}"
            print(f"product {rows:3d} x {out} x {width}: {said}", flush=True)


_ROW_TILES: Final = (
    ((8, 512), 4),
    ((4, 1024), 4),
    ((8, 1024), 4),
    ((4, 512), 2),
    ((16, 256), 4),
    ((2, 2048), 4),
    ((8, 1024), 8),
)
"""Tiles and warps of `row_product` that are tried."""


def _multiply_row(
    product: Callable[..., torch.Tensor],
    states: torch.Tensor,
    weights: Iterator[Any],
    tile: tuple[int, int],
    warps: int,
) -> torch.Tensor:
    return product(states, next(weights), tile=tile, warps=warps)


def _multiply(states: torch.Tensor, weights: Iterator[torch.Tensor]) -> torch.Tensor:
    return torch.nn.functional.linear(states, next(weights))


def few_bits(device: torch.device) -> None:
    """Products of weights of few bits beside cuBLAS' of floats; the fastest tiles decide the defaults.

    A form that is slower than cuBLAS for 64 rows needs a smaller `matrices.MOST_ROWS`.
    """
    from workers.kv_engine.gpu.few_bits import GpuQuantiser, packed  # noqa: PLC0415 - where there is Triton
    from workers.kv_engine.gpu.triton_few_bits import (  # noqa: PLC0415 - likewise
        few_bits_row,
        few_bits_rows,
    )

    for (bits, is_float), (out, width) in product(((4, False), (8, False), (8, True)), _FEW_BITS_SHAPES):
        floats = torch.randn(out, width, device=device, dtype=torch.bfloat16)
        chosen = GpuQuantiser(device, floats.dtype, is_float=is_float).quantised(floats, bits)
        count = max(2, _L2_BYTES // (out * width * bits // 8))
        weights = cycle([packed([chosen], device, floats.dtype) for _ in range(count)])
        name = f"{'fp' if is_float else 'int'}{bits} {out} x {width}"
        for rows in (1, 16, 64):
            states = torch.randn(rows, width, device=device, dtype=floats.dtype)
            cublas_us = _recorded_us(device, partial(_multiply, states, repeat(floats)))
            said = f"cuBLAS, floats in the cache: {cublas_us:.1f} us"
            kernel, tiles = (few_bits_row, _FEW_BITS_ROW) if rows == 1 else (few_bits_rows, _FEW_BITS_ROWS)
            for tile, warps in tiles:
                own_us = _recorded_us(device, partial(_multiply_row, kernel, states, weights, tile, warps))
                rate = _rate(next(weights).nbytes, own_us)
                said += f"; {tile[0]} x {tile[1]}, {warps}: {own_us:.1f} us, {rate}"
            print(f"{name}, {rows} rows: {said}", flush=True)


_FEW_BITS_SHAPES: Final = ((24_576, 4096), (4096, 4096))
_FEW_BITS_ROW: Final = (((8, 256), 4), ((4, 256), 4), ((4, 512), 4), ((16, 128), 4), ((8, 128), 2))
_FEW_BITS_ROWS: Final = (((64, 64), 4), ((32, 64), 4), ((64, 32), 4), ((128, 32), 4), ((128, 64), 8))
"""Tiles and warps that are tried, of outputs and pairs of inputs."""


def sampler(device: torch.device) -> None:
    """Recorded samplers over 152k logits. More than 0.2 ms is worth another look at the kernel."""
    for rows in (1, 16, 64):
        logits = torch.randn(rows, 151_936, device=device) * 3
        for kind, (is_random, is_filtered) in {
            "greedy": (False, False),
            "random": (True, False),
            "filtered": (True, True),
        }.items():
            given = _sampling_rows(rows, device, is_random=is_random, is_filtered=is_filtered)
            with torch.inference_mode():
                took_us = _recorded_us(device, partial(sample, logits, given, 1), count=4)
            print(f"sampler {kind}, {rows} rows: {took_us:.0f} us")


def attention_speed(device: torch.device) -> None:
    """Decodes of Qwen3-8B's shape over 40,960 tokens of room, by the most parts of a span, and by stages.

    The fastest number of parts decides `split_count`, and whether FlashInfer is worth its weight. An engine
    measures 3 and 5 stages at start (`workers.kv_engine.gpu.stages`): they should order as here.
    """
    from workers.kv_engine.attention.triton import attend  # noqa: PLC0415 - where there is Triton

    heads, kv_heads, dim, size = 32, 8, 128, 16
    one_long = [32_000] + [256] * 63
    for lengths in ([256], [1000], [8000], [256] * 64, [1000] * 64, one_long):
        rows = len(lengths)
        table, taken = torch.zeros(rows, 40_960 // size, dtype=torch.int32), 0
        for row, length in enumerate(lengths):
            count = -(-length // size)
            table[row, :count] = torch.arange(taken, taken + count)
            taken += count
        whole = torch.arange(rows + 1, dtype=torch.int32, device=device)
        step: Any = SimpleNamespace(
            rows=whole[:-1],
            query_offsets=whole,
            kv_lengths=torch.tensor(lengths, dtype=torch.int32, device=device),
            block_table=table.to(device),
            spans=SimpleNamespace(block_size=size),
        )
        pool = torch.randn(2, taken * size, kv_heads, dim, device=device, dtype=torch.bfloat16)
        queries = torch.randn(rows, heads, dim, device=device, dtype=torch.bfloat16)
        for parts in (None, 1, 2, 4, 8, 16, 32):
            took_us = _recorded_us(device, partial(attend, queries, pool[0], pool[1], step, parts=parts))
            read = _rate(4 * sum(lengths) * kv_heads * dim, took_us)
            said = f"{took_us:.0f} us, {read}"
            print(f"attention, {rows} rows, longest {max(lengths)}, at most {parts or 'our'} parts: {said}")
        for stages in (3, 4, 5, 6):
            took_us = _recorded_us(device, partial(attend, queries, pool[0], pool[1], step, stages=stages))
            read = _rate(4 * sum(lengths) * kv_heads * dim, took_us)
            print(
                f"attention, {rows} rows, longest {max(lengths)}, {stages} stages: {took_us:.0f} us, {read}"
            )


# ---- speeds of the engine ---------------------------------------------------------------------------------


def steps(device: torch.device) -> None:
    """Decodes of Qwen3-8B's and Orpheus-3B's shapes by sampling, their kernels; and first tokens.

    Goals on an H200: 210 and 415 tok/s of one row, greedy and as Orpheus; 70 % of the limit at 64. The
    kernels say where the rest of the time goes.
    """
    for shape, batches in zip(gpu.shapes(), ((1, 64), (1, 16)), strict=True):
        node = _node(gpu.random_weights(shape, device))
        for rows in batches:
            engine = _engine(node, rows, 1280, is_recorded=True)
            for name, sampling in _SAMPLINGS.items():
                _decode(engine, rows, sampling, steps=8)
                took_s = _decode(engine, rows, sampling, steps=64)
                said = f"{1e3 * took_s:.2f} ms, {rows / took_s:,.0f} tok/s"
                print(f"{shape.name}: decode, {rows} rows, {name}: {said}", flush=True)
            if device.type == "cuda":
                _profile(engine, rows)
            if rows == 1:
                for prompt in (16, 128, 512):
                    _first_token_s(engine, prompt)
                    taken = sorted(_first_token_s(engine, prompt) for _ in range(5))
                    print(f"{shape.name}: first token of {prompt}: {1e3 * taken[2]:.2f} ms", flush=True)
            del engine
        del node
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _first_token_s(engine: KVEngine, prompt: int) -> float:
    gpu.wait(engine.node.device)
    begun_s = time.perf_counter()
    engine.add(SequenceSpec(key="first", prompt_ids=_ids(prompt, 5), max_tokens=1, ignore_eos=True))
    while engine.has_work:
        engine.step()
    return time.perf_counter() - begun_s


def _decode(engine: KVEngine, rows: int, sampling: Sampling, *, steps: int) -> float:
    """Seconds per step of decodes alone."""
    _begin(engine, rows, sampling, tokens=steps + 8)
    engine.step()
    engine.step()
    begun_s = time.perf_counter()
    for _ in range(steps // 2):
        engine.step()
    took_s = (time.perf_counter() - begun_s) / (steps // 2)
    while engine.has_work:
        engine.step()
    return took_s


def _begin(engine: KVEngine, rows: int, sampling: Sampling, *, tokens: int) -> None:
    """Compute prompts of 128 tokens until all answers have begun."""
    for number in range(rows):
        engine.add(
            SequenceSpec(
                key=str(number),
                prompt_ids=_ids(128, number),
                max_tokens=tokens,
                ignore_eos=True,
                sampling=replace(sampling, seed=number),
            )
        )
    begun = set[str]()
    while len(begun) < rows:
        begun.update(output.key for output in engine.step())


def _profile(engine: KVEngine, rows: int) -> None:
    """Print the kernels of decodes that take the most time, per step."""
    from torch.profiler import ProfilerActivity, profile  # noqa: PLC0415 - slow to import

    count = 16
    _begin(engine, rows, Sampling(), tokens=count + 20)
    engine.step()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(count):
            engine.step()
        torch.cuda.synchronize()
    kernels = sorted(profiled.key_averages(), key=lambda one: -one.self_device_time_total)
    launches = sum(one.count for one in kernels) / count
    total_ms = sum(one.self_device_time_total for one in kernels) / count / 1e3
    print(f"kernels of a decode, {rows} rows: {launches:.0f} launches, {total_ms:.2f} ms")
    for one in kernels[:14]:
        print(f"    {one.self_device_time_total / count:8.1f} us  {one.count / count:6.1f}  {one.key[:80]}")
    while engine.has_work:
        engine.step()


# ---- helpers ------------------------------------------------------------------------------------------


def _small(device: torch.device) -> Any:
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=5000,
        max_position_embeddings=2048,
        initializer_range=0.1,
    )
    return _node(Qwen3ForCausalLM(config).eval().to(device))


def _node(model: Any) -> Any:
    config = model.config
    layout = KVLayout(
        layers=config.num_hidden_layers, kv_heads=config.num_key_value_heads, head_dim=config.head_dim
    )
    loaded = DecoderLM(
        model,
        name="llm",
        layout=layout,
        max_positions=config.max_position_embeddings,
        weights_digest="",
    )
    return use_gpu_kernels(loaded)


def _engine(node: Any, rows: int, longest: int, *, is_recorded: bool) -> KVEngine:
    device = node.device
    capture = CudaCapture(device) if is_recorded and device.type == "cuda" else None
    return gpu.make_engine(node, rows, gpu.Load(prompt=longest // 2, answer=longest // 2), capture)


def _answers(engine: KVEngine, count: int, length: int) -> dict[str, list[int]]:
    samplings = list(_SAMPLINGS.values())
    tokens: dict[str, list[int]] = {str(number): [] for number in range(count)}
    for number in range(count):
        engine.add(
            SequenceSpec(
                key=str(number),
                prompt_ids=_ids(12 + 9 * number, number),
                max_tokens=length,
                ignore_eos=True,
                sampling=samplings[number % len(samplings)],
            )
        )
    while engine.has_work:
        for output in engine.step():
            assert isinstance(output, TokenOutput)
            tokens[output.key].append(output.token_id)
    return tokens


def _ids(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(5000, (count,), generator=generator).tolist()
    return ids


def _sampling_rows(rows: int, device: torch.device, *, is_random: bool, is_filtered: bool) -> SamplingRows:
    def full(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((rows,), value, dtype=dtype, device=device)

    numbers = torch.arange(rows, dtype=torch.int32, device=device)
    return SamplingRows(
        temperature=full(0.6),
        top_p=full(0.8),
        top_k=full(0, torch.int32),
        min_p=full(0.0),
        seed_low=numbers,
        seed_high=numbers,
        sample_index=numbers,
        draw_index=numbers,
        is_random=is_random,
        has_top_k=is_filtered,
        has_top_p=is_filtered,
        has_min_p=is_filtered,
        candidates=None,
    )


def _recorded_us(device: torch.device, work: Callable[[], object], *, count: int = 20) -> float:
    """Microseconds of one among several in a CUDA graph: without the host's part."""

    def repeated() -> None:
        for _ in range(count):
            work()

    replay = CudaCapture(device).capture(repeated) if device.type == "cuda" else repeated
    replay()
    taken_us = []
    for _ in range(5):
        gpu.wait(device)
        begun_s = time.perf_counter()
        replay()
        gpu.wait(device)
        taken_us.append(1e6 * (time.perf_counter() - begun_s) / count)
    return min(taken_us)


def _rate(nbytes: float, took_us: float) -> str:
    return f"{nbytes / took_us / 1e6:.2f} TB/s"


CHECKS: Final[dict[str, Callable[[torch.device], None]]] = {
    "environment": environment,
    "attention": attention,
    "engines": engines,
    "failed_capture": failed_capture,
    "products": products,
    "few_bits": few_bits,
    "sampler": sampler,
    "attention_speed": attention_speed,
    "steps": steps,
}
