"""Diffusion language models: tokens per forward and per second, against one token a step.

The trained demo answers questions about Python's functions, in blocks of 16. All ways to fill in the masks
answer the same questions in turns. For each, the report has the answers that are equal to the plain ones, and
the right answers: the sentence of the corpus, to its end. The demo's own chat model is the verifier of APD.

The prefix and the dual cache are approximations. Their error is that of a block's logits against those of the
whole canvas without a cache, in standard deviations, on the canvases of the run itself.

A forward pass of the demo is so small that its time hardly depends on its tokens. What a cache saves is
measured with random weights of 40 million, which say nothing about answers: all ways fill in 2 tokens a step.
"""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch
from tokenizers import Tokenizer

from benchmarks import random_model
from benchmarks.report import RATIO, Figure, spread
from configs.demo.conversations import load_corpus
from configs.demo.encoding import TURN_END, TURN_START
from configs.demo_diffusion.train import MASK
from models.diffusion_text.apd_options import APD
from models.diffusion_text.candidates import draw_plain
from models.diffusion_text.canvas import CanvasDriver, CanvasRecipe
from models.diffusion_text.node import DiffusionLM
from models.diffusion_text.refinement import Rules
from models.diffusion_text.schedule import even
from models.masked_diffusion.graph import CANVAS
from models.masked_diffusion.nodes import load
from models.programs import NewTokens, Pass, TokenDriver, TokenRequest
from models.sequence_request import SamplingParams
from workers.cpu_kernels.decoder import use_cpu_kernels
from workers.kv_engine.engine import KVEngine
from workers.kv_engine.outputs import EmissionOutput
from workers.kv_engine.sequence_spec import SequenceSpec

ROUNDS: Final = 3
EVERY: Final = 24
"""One question in so many of the corpus is asked."""
AT_ONCE: Final = 4
BLOCK: Final = 16
MAX_TOKENS: Final = 64
DEMO: Final = Path(__file__).parent.parent / "configs"
PLAIN: Final = "one token a step"
WAYS: Final[Mapping[str, dict[str, Any]]] = {
    PLAIN: {},
    "above 0.9": {"confidence_threshold": 0.9},
    "above 0.6": {"confidence_threshold": 0.6},
    "factor 1": {"factor": 1.0},
    "4 steps a block": {"steps": 16},
    "prefix cache": {"cache": "prefix"},
    "dual cache": {"cache": "dual"},
    "above 0.9, prefix cache": {"confidence_threshold": 0.9, "cache": "prefix"},
    "above 0.9, dual cache": {"confidence_threshold": 0.9, "cache": "dual"},
    "APD, verifier 0.3": {"apd": True, "apd_lookahead": BLOCK},
    "APD, verifier 0.5": {"apd": True, "apd_lookahead": BLOCK, "apd_verifier_weight": 0.5},
    "APD, window 16": {"apd": True, "apd_lookahead": BLOCK, "apd_window": 16},
}
WIDE: Final[Mapping[str, dict[str, Any]]] = {
    "no cache": {},
    "prefix cache": {"cache": "prefix"},
    "dual cache": {"cache": "dual"},
}
_POOL: Final = 16 * 1024


@dataclass(slots=True)
class _Round:
    """The answers of one way to all questions.

    Attributes:
        tokens: of the answers, up to the token that ends them.
    """

    answers: list[list[int]]
    tokens: int
    forwards: int
    verifier_forwards: int
    seconds: float


@dataclass(frozen=True, slots=True)
class _Question:
    prompt: list[int]
    answer: list[int]


def measure() -> list[Figure]:
    return [*_ways(), *_errors(), *_wide()]


# ---- the demo ------------------------------------------------------------------------------------------
def _demo() -> DiffusionLM:
    kwargs = {"block_length": BLOCK, "verifier": str(DEMO / "demo" / "checkpoint")}
    return load(DEMO / "demo_diffusion" / "checkpoint", dtype="float32", kwargs=kwargs)


@cache
def _served() -> Any:
    """The demo as it is served: by our kernels, which free transformers' weights."""
    return use_cpu_kernels(_demo(), threads=1)


@cache
def _tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO / "demo_diffusion" / "checkpoint" / "tokenizer.json"))


def _id_of(token: str) -> int:
    found = _tokenizer().token_to_id(token)
    assert found is not None
    return found


def _questions() -> list[_Question]:
    def ids(text: str) -> list[int]:
        found: list[int] = _tokenizer().encode(text, add_special_tokens=False).ids
        return found

    return [
        _Question(
            prompt=ids(f"{TURN_START}user\nWhat does {name} do?{TURN_END}\n{TURN_START}assistant\n"),
            answer=ids(f"{sentence}{TURN_END}"),
        )
        for name, sentence in sorted(load_corpus().items())[::EVERY]
    ]


def _ways() -> list[Figure]:
    questions = _questions()
    rounds: dict[str, list[_Round]] = {way: [] for way in WAYS}
    for _ in range(ROUNDS):
        for way, options in WAYS.items():
            rounds[way].append(_answer(questions, options))
    base = rounds[PLAIN]
    figures: list[Figure] = []
    for way, done in rounds.items():
        first = done[0]
        of = f"of {len(questions)}"
        same = sum(mine == other for mine, other in zip(first.answers, base[0].answers, strict=True))
        right = sum(mine == one.answer for mine, one in zip(first.answers, questions, strict=True))
        rates = [one.tokens / one.seconds for one in done]
        ratios = [
            one.tokens / one.seconds / (other.tokens / other.seconds)
            for one, other in zip(done, base, strict=True)
        ]
        if way != PLAIN:
            figures.append(spread(f"demo, {way} / {PLAIN}: tokens per second", ratios, RATIO))
        verifier = f"and {first.verifier_forwards / first.forwards:.2f} of the verifier"
        figures += [
            Figure(
                f"demo, {way}: tokens per forward",
                first.tokens / first.forwards,
                "",
                verifier if first.verifier_forwards else "",
            ),
            spread("  tokens per second", rates, "tok/s"),
            Figure("  answers equal to the plain ones", same, "", of),
            Figure("  right answers", right, "", of),
        ]
    return figures


def _answer(questions: Sequence[_Question], options: Mapping[str, Any]) -> _Round:
    """Answer all questions, some at a time."""
    engine = random_model.engine(_served(), tokens=_POOL, max_pass_tokens=1024)
    end = _id_of(TURN_END)
    answers: dict[str, list[int]] = {str(number): [] for number in range(len(questions))}
    waiting = list(enumerate(questions))
    live, counts = 0, Counter[str]()
    begun_s = time.perf_counter()
    while waiting or live:
        while waiting and live < AT_ONCE:
            number, question = waiting.pop(0)
            engine.add(_spec(str(number), question.prompt, frozenset({end}), options))
            live += 1
        for output in engine.step():
            assert isinstance(output, EmissionOutput)
            answers[output.key] += output.token_ids
            if output.finish is not None:
                counts.update(output.counts)
                live -= 1
    seconds = time.perf_counter() - begun_s
    tokens = sum(len(one) for one in answers.values())
    return _Round([*answers.values()], tokens, counts["forwards"], counts["verifier_forwards"], seconds)


def _spec(key: str, prompt: list[int], ends: frozenset[int], options: Mapping[str, Any]) -> SequenceSpec:
    return SequenceSpec(
        key=key,
        prompt_ids=prompt,
        max_tokens=MAX_TOKENS,
        eos_ids=ends,
        token_program=APD if options.get("apd") else CANVAS,
        options={"block_length": BLOCK, **options} if not options.get("apd") else dict(options),
    )


# ---- the error of the caches -----------------------------------------------------------------------------
class _Observed:
    """A driver whose logits are compared with those of the whole canvas."""

    def __init__(self, driver: TokenDriver, model: Any, canvas: list[int]) -> None:
        self._driver, self._model, self._canvas = driver, model, canvas
        self._asked: Sequence[Pass] = ()
        self.errors: list[float] = []
        self.others: list[bool] = []
        self.max_contexts, self.max_tokens = driver.max_contexts, driver.max_tokens

    def passes(self) -> Sequence[Pass]:
        """The passes of the driver."""
        self._asked = self._driver.passes()
        return self._asked

    def take(self, results: Sequence[torch.Tensor]) -> NewTokens | None:
        """Compare, and let the driver go on."""
        [asked], [found] = self._asked, results
        assert asked.ids is not None
        assert asked.logits is not None
        assert isinstance(asked.positions, torch.Tensor)
        places = asked.positions.tolist()
        for place, token in zip(places, asked.ids, strict=True):
            self._canvas[place] = token
        ids = torch.tensor([self._canvas])
        seen = torch.zeros(1, 1, ids.shape[1], ids.shape[1])
        logits = self._model(input_ids=ids, attention_mask=seen, use_cache=False).logits[0]
        exact = logits[[places[index] for index in asked.logits]]
        self.errors.append(float((found - exact).pow(2).mean().sqrt() / exact.std()))
        self.others += (found.argmax(-1) != exact.argmax(-1)).tolist()
        return self._driver.take(results)


@torch.inference_mode()
def _errors() -> list[Figure]:
    from tests.models.block_diffusion.naive import NaiveRun  # noqa: PLC0415 - only here

    node, figures = _demo(), list[Figure]()
    mask = _id_of(MASK)
    for way in ("prefix", "dual"):
        errors, others = list[float](), list[bool]()
        for question in _questions()[:16]:
            request = TokenRequest(
                prompt_ids=question.prompt,
                prefix_ids=[],
                max_tokens=MAX_TOKENS,
                end_ids=frozenset({_id_of(TURN_END)}),
                sampling=SamplingParams(),
                options={"block_length": BLOCK, "cache": way},
                seed=0,
                choice=0,
            )
            canvas = [*question.prompt, *[mask] * MAX_TOKENS]
            observed = _Observed(node.token_programs[CANVAS](node, request), node.model, canvas)
            NaiveRun({"": node.model}).run(observed)
            errors += observed.errors
            others += observed.others
        figures += [
            Figure(
                f"demo, {way} cache: error of the logits", median(errors), "sd", f"up to {max(errors):.2g}"
            ),
            Figure("  places whose likeliest token differs", sum(others) / len(others) * 100, "%"),
        ]
    return figures


# ---- the time that caches save ---------------------------------------------------------------------------
def _wide() -> list[Figure]:
    served = random_model.node(served_as=lambda stock: DiffusionLM(stock, {CANVAS: _wide_canvas}))
    rates: dict[str, list[float]] = {way: [] for way in WIDE}
    for number in range(ROUNDS):
        for way, options in WIDE.items():
            rates[way].append(_wide_rate(served, number, options))
    figures = [spread("random 40 M, no cache", rates["no cache"], "tok/s")]
    for way in ("prefix cache", "dual cache"):
        ratios = [mine / other for mine, other in zip(rates[way], rates["no cache"], strict=True)]
        figures.append(spread(f"random 40 M, {way} / no cache: tokens per second", ratios, RATIO))
    return figures


def _wide_canvas(node: Any, request: TokenRequest) -> TokenDriver:
    """Blocks of 16, of which each step fills in 2 tokens."""
    recipe = CanvasRecipe(
        mask_id=0,
        shifts=False,
        block_length=BLOCK,
        draw=draw_plain,
        rules_of=lambda masks, _: Rules(quotas=even(masks, masks // 2)),
        cache=request.options.get("cache", "none"),
    )
    return CanvasDriver(request, recipe, device=node.device)


def _wide_rate(served: Any, number: int, options: Mapping[str, Any]) -> float:
    engine: KVEngine = random_model.engine(served, tokens=_POOL, max_pass_tokens=1024)
    engine.add(_spec("wide", random_model.prompt(number, 256), frozenset(), options))
    begun_s = time.perf_counter()
    while engine.has_work:
        engine.step()
    return MAX_TOKENS / (time.perf_counter() - begun_s)
