"""The engine on a GPU, compared with transformers on the same weights, in process.

    python -m benchmarks gpu            needs a GPU with room for 16 GB of weights, and torch with CUDA
    python -m benchmarks gpu --shape Qwen3-8B --only ours --budget 120
    python -m benchmarks gpu --budget 540 --keep gpu.jsonl      measures what the file lacks; run it again

First the read bandwidth of the GPU's memory, which limits a decode: each step reads all weights and all keys
and values. Then, one after the other: our engine with CUDA graphs, each step launched before the previous one
is read; the same engine, each step read first; our engine without CUDA graphs; our engine with FlashInfer's
attention, if installed; transformers' continuous batching; and a loop over a static cache, compiled with CUDA
graphs; at last our engine again. All use the same random bfloat16 weights in the same memory, the same
prompts, and greedy answers of the same length. Each figure is printed at once.

`python -m benchmarks gpu-first` comes before it: it checks results, and takes minutes.
"""

import argparse
import copy
import dataclasses
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from statistics import median
from typing import Any, Final

import torch
from transformers import (
    ContinuousBatchingConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    StaticCache,
)

from benchmarks.kept import KeptFigures, add_option
from benchmarks.machine import described
from benchmarks.report import RATIO, Figure, spread
from models.base import KVLayout
from models.transformers_lm.node import DecoderLM
from workers.kv_engine.attention.kernels import AttentionKernel, choose_attention, default_kernel
from workers.kv_engine.attention.paged import ATTENTION
from workers.kv_engine.config import KVEngineConfig
from workers.kv_engine.engine import KVEngine
from workers.kv_engine.gpu.cuda_graphs import CudaCapture, GraphCapture
from workers.kv_engine.gpu.fusion import use_gpu_kernels
from workers.kv_engine.node import KVNode
from workers.kv_engine.sequence_spec import SequenceSpec

NO_GPU: Final = 2
"""The exit status without a GPU."""

_OURS: Final = "ours"
_READ_FIRST: Final = "ours, each step read first"
_AS_IT_COMES: Final = "ours, without CUDA graphs"
_FLASHINFER: Final = "ours, FlashInfer attention"
_CONTINUOUS: Final = "transformers continuous"
_STATIC: Final = "static cache, compiled"
CONTENDERS: Final = (_OURS, _READ_FIRST, _AS_IT_COMES, _FLASHINFER, _CONTINUOUS, _STATIC)
"""In the order in which they are measured."""
_BLOCK: Final = 16
_SILENCE_S: Final = 300.0
_READ_BYTES: Final = 8 << 30
_READS: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model's shape and its goals.

    Attributes:
        goals: by number of requests: tokens/s, or a share of the limit if below 1.
    """

    name: str
    model: Any
    config: Any
    goals: dict[int, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The load: tokens of prompts and answers, and the number of rounds."""

    prompt: int = 128
    answer: int = 256
    rounds: int = 3


@dataclass(slots=True)
class Timed:
    """Seconds until all requests had their first token, if known, and until all had their last."""

    first_s: float | None
    end_s: float


Ask = Callable[[list[list[int]], int], Timed]
Contender = Callable[[], AbstractContextManager[Ask]]


def shapes() -> list[Shape]:
    eight = Qwen3Config(
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151_936,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    orpheus = LlamaConfig(
        hidden_size=3072,
        intermediate_size=8192,
        num_hidden_layers=28,
        num_attention_heads=24,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=156_940,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    return [
        Shape(name="Qwen3-8B", model=Qwen3ForCausalLM, config=eight, goals={1: 210.0, 64: 0.7}),
        Shape(name="Orpheus-3B", model=LlamaForCausalLM, config=orpheus, goals={1: 415.0}),
    ]


def main(options: Sequence[str] = ()) -> None:
    """Print each figure as soon as it is measured."""
    asked = _parsed(options)
    if not torch.cuda.is_available():
        print("expected a GPU and torch with CUDA, found none: nothing was measured", file=sys.stderr)
        sys.exit(NO_GPU)
    print(described())
    device = torch.device("cuda", torch.cuda.current_device())
    print(f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}")
    default_kernel(device.type)
    reads = read_bytes_per_s(device)
    print(f"memory bandwidth {reads / 1e12:.2f} TB/s", flush=True)
    until_s = time.perf_counter() + asked.budget
    for shape in shapes():
        if asked.shape in ("", shape.name):
            kept = KeptFigures(asked.keep)
            measured = measure(shape, device, reads, Load(), only=asked.only, until_s=until_s, kept=kept)
            for figure in measured:
                print(figure.line(), flush=True)
            torch.cuda.empty_cache()


def _parsed(options: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks gpu")
    parser.add_argument("--shape", default="", choices=[shape.name for shape in shapes()])
    parser.add_argument(
        "--only", action="append", default=[], choices=CONTENDERS, help="measure these; may be repeated"
    )
    parser.add_argument(
        "--budget", type=float, default=math.inf, metavar="SECONDS", help="begin nothing after this time"
    )
    add_option(parser)
    return parser.parse_args(options)


def read_bytes_per_s(device: torch.device, nbytes: int = _READ_BYTES) -> float:
    """Measure read bandwidth: the fastest of several sums over memory far larger than the caches."""
    numbers = torch.ones(nbytes // 4, dtype=torch.float32, device=device)
    least_s = min(_took_s(device, numbers.sum) for _ in range(_READS))
    return nbytes / least_s


def random_weights(shape: Shape, device: torch.device) -> Any:
    """Return a model of the shape with random bfloat16 weights."""
    torch.manual_seed(0)
    with torch.device(device):
        torch.set_default_dtype(torch.bfloat16)
        try:
            return shape.model(copy.deepcopy(shape.config)).eval().requires_grad_(requires_grad=False)
        finally:
            torch.set_default_dtype(torch.float32)


def measure(
    shape: Shape,
    device: torch.device,
    reads: float,
    load: Load,
    *,
    compiles: bool = True,
    only: Sequence[str] = (),
    until_s: float = math.inf,
    kept: KeptFigures | None = None,
) -> Iterator[Figure]:
    """Measure one contender after the other, ours first, for each number of requests.

    A contender that fails is reported, and the others are measured. The first one is measured again at the
    end: if its figure differs, so may the ratios.

    Args:
        shape: the model's shape and goals; its weights are random.
        device: the device of the weights.
        reads: the bandwidth in bytes/s.
        load: what is asked.
        compiles: whether the loop over the static cache is compiled.
        only: the names of contenders; all if empty.
        until_s: the time, by `time.perf_counter`, after which no contender begins.
        kept: figures of earlier runs; they are yielded, and not measured again.

    Yields:
        each figure when it is measured. The value of a contender that failed, or was left out, is NaN.
    """
    kept = kept or KeptFigures()
    model: Any = None
    for rows, goal in shape.goals.items():
        what = f"{shape.name}, {rows} at a time"
        limit = f"{what}: decodes alone, of the limit"
        names = [name for name in CONTENDERS if not only or name in only]
        contenders: dict[str, Contender] = {}
        ours: float | None = None
        for place, name in enumerate([*names, names[0]] if len(names) > 1 else names):
            is_again = place == len(names)
            label = f"{what}: {name}{', again' if is_again else ''}"
            is_known = label in kept
            if is_known:
                yield _before(kept[label])
            elif time.perf_counter() > until_s:
                yield Figure(label, math.nan, "tok/s", "left out: the time is used up")
                continue
            else:
                model = random_weights(shape, device) if model is None else model
                contenders = contenders or _contenders(shape, model, device, rows, load, compiles=compiles)
                try:
                    timed = _timed(contenders[name], shape, rows, load)
                except Exception as error:  # noqa: BLE001 - whatever fails, the others are measured
                    yield Figure(label, math.nan, "tok/s", f"failed: {type(error).__name__}: {error}"[:200])
                    continue
                if name == _OURS and not is_again:
                    kept.keep(_of_the_limit(limit, model, rows, goal, timed, reads, load))
                yield kept.keep(spread(label, [rows * load.answer / one.end_s for one in timed], "tok/s"))
            if name == _OURS and not is_again:
                ours = kept[label].value
                yield _before(kept[limit]) if is_known else kept[limit]
            elif ours is not None and not is_again:
                yield Figure(f"{what}: ours / {name}", ours / kept[label].value, RATIO)


def _before(figure: Figure) -> Figure:
    return dataclasses.replace(figure, note=f"{figure.note}; measured before")


def _timed(contender: Contender, shape: Shape, rows: int, load: Load) -> list[Timed]:
    found = []
    with contender() as ask:
        for number in range(load.rounds):
            ask(_prompts(shape, rows, load, seed=1000 + number), load.answer)  # warm up
            found.append(ask(_prompts(shape, rows, load, seed=number), load.answer))
    return found


def _of_the_limit(
    name: str, model: Any, rows: int, goal: float, timed: list[Timed], reads: float, load: Load
) -> Figure:
    """Decodes alone, as a share of what the memory's bandwidth allows; and whether the goal is reached."""
    steps = median((load.answer - 1) / (one.end_s - one.first_s) for one in timed if one.first_s is not None)
    limit = reads / _bytes_per_step(model, rows, load)
    decoded, is_share = rows * steps, goal < 1
    reached = steps / limit if is_share else decoded
    said = f"goal {goal:.0%}" if is_share else f"goal {goal:.0f} tok/s"
    note = f"{decoded:,.0f} of {rows * limit:,.0f} tok/s; {said} {'reached' if reached >= goal else 'missed'}"
    return Figure(name, 100 * steps / limit, "%", note)


def _bytes_per_step(model: Any, rows: int, load: Load) -> float:
    """The bytes that a decode in the middle of the answers reads: weights, keys and values."""
    config = model.config
    weights = sum(parameter.nbytes for parameter in model.parameters())
    if not config.tie_word_embeddings:
        weights -= model.get_input_embeddings().weight.nbytes  # a decode reads one row of it per token
    of_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 2
    return float(weights + rows * (load.prompt + load.answer / 2) * of_token)


def _prompts(shape: Shape, rows: int, load: Load, *, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    ids: list[list[int]] = torch.randint(
        shape.config.vocab_size, (rows, load.prompt), generator=generator
    ).tolist()
    return ids


def _took_s(device: torch.device, work: Callable[[], object]) -> float:
    wait(device)
    begun_s = time.perf_counter()
    work()
    wait(device)
    return time.perf_counter() - begun_s


def wait(device: torch.device) -> None:
    """Wait for all work on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ---- the measured engines -------------------------------------------------------------------------------


def _contenders(
    shape: Shape, model: Any, device: torch.device, rows: int, load: Load, *, compiles: bool
) -> dict[str, Contender]:
    config = model.config
    model.set_attn_implementation("sdpa")  # the last contender's may be another one
    loaded = DecoderLM(
        model,
        name="llm",
        layout=KVLayout(
            layers=config.num_hidden_layers, kv_heads=config.num_key_value_heads, head_dim=config.head_dim
        ),
        max_positions=config.max_position_embeddings,
        weights_digest="",
    )
    node = use_gpu_kernels(loaded)  # shares the model's weights

    def capture() -> GraphCapture | None:
        return CudaCapture(device) if device.type == "cuda" else None

    # Made when they are measured: one that fails, such as a kernel that does not compile, stops no other.
    recorded = cache(lambda: make_engine(node, rows, load, capture()))
    longest = load.prompt + load.answer
    return {
        _OURS: _ours(node, recorded, runs_ahead=True),
        _READ_FIRST: _ours(node, recorded, runs_ahead=False),
        _AS_IT_COMES: _ours(node, lambda: make_engine(node, rows, load, None), runs_ahead=False),
        _FLASHINFER: _ours(
            node,
            lambda: make_engine(node, rows, load, capture(), choose_attention(node, "flashinfer")),
            runs_ahead=True,
        ),
        _CONTINUOUS: lambda: _continuous(model, rows),
        _STATIC: lambda: _StaticLoop(model, device, rows, longest, compiles=compiles).loaded(),
    }


def make_engine(
    node: KVNode, rows: int, load: Load, capture: GraphCapture | None, kernel: AttentionKernel | None = None
) -> KVEngine:
    """Return an engine for `rows` requests of the load."""
    blocks = -(-(load.prompt + load.answer) // _BLOCK) + 1
    return KVEngine(
        node,
        KVEngineConfig(
            num_blocks=2 * rows * blocks,
            block_size=_BLOCK,
            max_step_tokens=4096,
            max_sequences=rows,
            prefix_cache=False,
        ),
        capture=capture,
        kernel=kernel,
    )


def _ours(node: KVNode, make: Callable[[], KVEngine], *, runs_ahead: bool) -> Contender:
    @contextmanager
    def loaded() -> Iterator[Ask]:
        engine = make()
        node.use_attention(ATTENTION)
        engine.runs_ahead = runs_ahead
        yield partial(ask, engine)

    def ask(engine: KVEngine, prompts: list[list[int]], tokens: int) -> Timed:
        for number, ids in enumerate(prompts):
            engine.add(SequenceSpec(key=str(number), prompt_ids=ids, max_tokens=tokens, ignore_eos=True))
        begun_s, first_s, waiting = time.perf_counter(), 0.0, set(map(str, range(len(prompts))))
        while engine.has_work:
            outputs = engine.step()
            if waiting:
                waiting.difference_update(output.key for output in outputs)
                first_s = time.perf_counter() - begun_s
        return Timed(first_s, time.perf_counter() - begun_s)

    return loaded


@contextmanager
def _continuous(model: Any, rows: int) -> Iterator[Ask]:
    model.set_attn_implementation("sdpa")
    model.generation_config.eos_token_id = -1
    # transformers 5.17 names it `block_size`.
    known = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}
    page = {"page_size" if "page_size" in known else "block_size": 256}
    config = ContinuousBatchingConfig(**page, num_blocks=4 * rows, max_batch_tokens=4096)
    asked = 0
    with model.continuous_batching_context_manager(continuous_batching_config=config, timeout=5) as manager:

        def ask(prompts: list[list[int]], tokens: int) -> Timed:
            nonlocal asked
            begun_s = time.perf_counter()
            for ids in prompts:
                manager.add_request(ids, request_id=str(asked), max_new_tokens=tokens)
                asked += 1
            for _ in prompts:
                output = manager.get_result(timeout=_SILENCE_S)
                if output is None or output.error is not None or len(output.generated_tokens) != tokens:
                    raise RuntimeError(f"expected {tokens} tokens, found {output!r}")
            return Timed(None, time.perf_counter() - begun_s)

        yield ask
    model.set_attn_implementation("sdpa")


class _StaticLoop:
    """One batch on transformers' static cache: compiled forward, token ids fed back on the device."""

    def __init__(self, model: Any, device: torch.device, rows: int, longest: int, *, compiles: bool) -> None:
        self._model = model
        self._device = device
        self._cache = StaticCache(config=model.config, max_cache_len=longest)
        self._decode: Callable[[torch.Tensor], torch.Tensor] = (
            torch.compile(self._next, mode="reduce-overhead", fullgraph=True) if compiles else self._next
        )

    @contextmanager
    def loaded(self) -> Iterator[Ask]:
        self._model.set_attn_implementation("sdpa")
        yield self.ask

    @torch.no_grad()
    def ask(self, prompts: list[list[int]], tokens: int) -> Timed:
        begun_s = time.perf_counter()
        self._cache.reset()
        ids = self._next(torch.tensor(prompts, device=self._device))
        wait(self._device)
        first_s = time.perf_counter() - begun_s
        for _ in range(tokens - 1):
            # A graph's output is overwritten by its next replay, which reads it.
            ids = self._decode(ids).clone()
        wait(self._device)
        return Timed(first_s, time.perf_counter() - begun_s)

    def _next(self, ids: torch.Tensor) -> torch.Tensor:
        output = self._model(input_ids=ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        likeliest: torch.Tensor = output.logits[:, -1].argmax(-1, keepdim=True)
        return likeliest
