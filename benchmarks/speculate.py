"""Speculation: how much faster are answers that somebody guesses, and how many of the guesses stand?

Guessed by looking up what followed the same tokens before, on answers that repeat themselves, and on ones
that do not; by a model of the same weights, of which every guess stands; and by one of a quarter of the
layers, where the others say little. All answers have to be, token by token, those without speculation.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.random_model import LAYERS, engine, node, prompt, spec
from benchmarks.report import RATIO, Figure, spread
from workers.kv_engine.engine import KVEngine
from workers.kv_engine.outputs import TokenOutput
from workers.kv_engine.sequence_spec import Sampling, SequenceSpec
from workers.kv_engine.speculative.draft_model import DraftModel
from workers.kv_engine.speculative.proposer import PromptLookup, Proposer

ROWS: Final = 2
TOKENS: Final = 96
GUESSES: Final = 4
ROUNDS: Final = 3
_POOL: Final = 16 * 1024


@dataclass(slots=True)
class _Round:
    rate: float
    stood: float
    answers: list[list[int]]


def measure() -> list[Figure]:
    model = node(quiet_from=LAYERS // 4)

    drafts = {layers: node(layers=layers, quiet_from=LAYERS // 4) for layers in (LAYERS, LAYERS // 4)}

    def draft(layers: int) -> Proposer:
        return DraftModel(
            drafts[layers],
            served="llm",
            num_blocks=_POOL // 16,
            block_size=16,
            max_sequences=32,
            max_step_tokens=512,
        )

    ways: dict[str, Callable[[], Proposer]] = {
        "by lookup": PromptLookup,
        "by the same weights": lambda: draft(LAYERS),
        "by a quarter of the layers": lambda: draft(LAYERS // 4),
    }
    texts: dict[str, float] = {"greedy, which repeats itself": 0.0, "at temperature 1": 1.0}
    figures: list[Figure] = []
    for text, temperature in texts.items():
        plain: list[_Round] = []
        guessed: dict[str, list[_Round]] = {way: [] for way in ways}
        for number in range(ROUNDS):
            plain.append(_answer(engine(model, tokens=_POOL), number, temperature))
            for way, make in ways.items():
                served = engine(model, tokens=_POOL, proposer=make(), speculative_tokens=GUESSES)
                guessed[way].append(_answer(served, number, temperature))
        figures += [spread(f"{text}, nobody guesses", [one.rate for one in plain], "tok/s")]
        for way, rounds in guessed.items():
            ratios = [one.rate / other.rate for one, other in zip(rounds, plain, strict=True)]
            others = sum(
                mine != theirs
                for one, other in zip(rounds, plain, strict=True)
                for mine, theirs in zip(one.answers, other.answers, strict=True)
            )
            figures += [
                spread(f"{text}, guessed {way}, to nobody", ratios, RATIO),
                spread(f"{text}, guessed {way}", [one.rate for one in rounds], "tok/s"),
                spread("  of the guesses stood", [one.stood for one in rounds], ""),
                Figure("  answers that differ", others, "", f"of {ROWS * ROUNDS}"),
            ]
    return figures


def _answer(served: KVEngine, number: int, temperature: float) -> _Round:
    for row in range(ROWS):
        served.add(_spec(str(row), number * ROWS + row, temperature))
    answers: dict[str, list[int]] = {str(row): [] for row in range(ROWS)}
    served.step()  # the prompts
    begun_s = time.perf_counter()
    while served.has_work:
        for output in served.step():
            assert isinstance(output, TokenOutput)
            answers[output.key].append(output.token_id)
    took_s = time.perf_counter() - begun_s
    counts = served.stats().cache
    return _Round(
        rate=ROWS * (TOKENS - 1) / took_s,
        stood=counts.accepted / counts.drafted if counts.drafted else 0.0,
        answers=list(answers.values()),
    )


def _spec(key: str, seed: int, temperature: float) -> SequenceSpec:
    how: dict[str, Any] = {"sampling": Sampling(temperature=temperature, seed=seed)} if temperature else {}
    plain = spec(key, prompt(seed, 64), TOKENS)
    return SequenceSpec(key=plain.key, prompt_ids=plain.prompt_ids, max_tokens=TOKENS, ignore_eos=True, **how)
