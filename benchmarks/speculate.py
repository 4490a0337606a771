"""Speedup and acceptance rate of speculative decoding.

Drafts come from prompt lookup, on answers that repeat themselves and on answers that do not; from a draft
model with the same weights, of which every token is accepted; and from one with a quarter of the layers,
where the other layers contribute little. All answers must equal those without speculation, token by token.
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
        "the same weights": lambda: draft(LAYERS),
        "a quarter of the layers": lambda: draft(LAYERS // 4),
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
        figures += [spread(f"{text}, no speculation", [one.rate for one in plain], "tok/s")]
        for way, rounds in guessed.items():
            ratios = [one.rate / other.rate for one, other in zip(rounds, plain, strict=True)]
            others = sum(
                mine != theirs
                for one, other in zip(rounds, plain, strict=True)
                for mine, theirs in zip(one.answers, other.answers, strict=True)
            )
            figures += [
                spread(f"{text}, drafted by {way} / no speculation", ratios, RATIO),
                spread(f"{text}, drafted by {way}", [one.rate for one in rounds], "tok/s"),
                spread("  acceptance rate", [one.stood for one in rounds], ""),
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
