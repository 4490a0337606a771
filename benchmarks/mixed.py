"""Effect of a prompt of 4096 tokens on running answers, and the cost of limiting it.

With a prefill budget (`decode_slowdown_limit`), and without: prompts then fill every step. Measured is the
time between two tokens of each answer, before and while the prompt is computed.
"""

import time
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any, Final

from benchmarks.random_model import engine, node, prompt, spec
from benchmarks.report import RATIO, Figure, spread
from workers.kv_engine.engine import KVEngine
from workers.kv_engine.outputs import TokenOutput

ANSWERS: Final = 8
LONG: Final = 4096
BEFORE: Final = 40
"""Tokens of each answer before the prompt arrives, and after its first token."""
ROUNDS: Final = 2


@dataclass(slots=True)
class _Round:
    """The times between tokens in one round, before the prompt arrived and while it was computed."""

    alone_s: list[float]
    beside_s: list[float]
    first_s: float
    tokens: list[list[int]]


def measure() -> list[Figure]:
    model = node(layers=4)
    rounds: dict[str, list[_Round]] = {"with a budget": [], "without": []}
    for number in range(ROUNDS):
        for name, found in rounds.items():
            how: dict[str, Any] = {} if name == "with a budget" else {"decode_slowdown_limit": None}
            served = engine(model, tokens=LONG + 64 * 1024, prefix_cache=False, **how)
            found.append(_round(served, number))
    figures: list[Figure] = []
    for name, found in rounds.items():
        all_s = [one.alone_s + one.beside_s for one in found]
        figures += [
            spread(f"between tokens: p99 / p50, {name}", [_p99(one) / median(one) for one in all_s], RATIO),
            spread(
                f"p99 with the prompt / p50 without it, {name}",
                [_p99(one.beside_s) / median(one.alone_s) for one in found],
                RATIO,
            ),
            spread(f"p50 with the prompt, {name}", [1e3 * median(one.beside_s) for one in found], "ms"),
            spread(f"p99 with the prompt, {name}", [1e3 * _p99(one.beside_s) for one in found], "ms"),
            spread(f"first token of the prompt, {name}", [1e3 * one.first_s for one in found], "ms"),
        ]
    paced, free = rounds.values()
    slower = [one.first_s / other.first_s for one, other in zip(paced, free, strict=True)]
    stalls = [_p99(other.beside_s) / _p99(one.beside_s) for one, other in zip(paced, free, strict=True)]
    others = sum(
        mine[: len(plain)] != plain[: len(mine)]
        for one, other in zip(paced, free, strict=True)
        for mine, plain in zip(one.tokens, other.tokens, strict=True)
    )
    return [
        spread("p99 with the prompt: without a budget / with one", stalls, RATIO),
        spread("first token of the prompt: with a budget / without", slower, RATIO),
        *figures,
        Figure("answers that differ", others, "", f"of {(ANSWERS + 1) * ROUNDS}"),
    ]


def _p99(values: list[float]) -> float:
    return quantiles(values, n=100, method="inclusive")[98]


def _round(served: KVEngine, number: int) -> _Round:
    for each in range(ANSWERS):
        served.add(spec(str(each), prompt(100 * number + each, 32), 4000))
    last_s: dict[str, float] = {}
    tokens: dict[str, list[int]] = {key: [] for key in (*map(str, range(ANSWERS)), "long")}

    def step(gaps_s: list[float]) -> None:
        outputs = served.step()
        now_s = time.perf_counter()
        for output in outputs:
            assert isinstance(output, TokenOutput)
            tokens[output.key].append(output.token_id)
            if output.key in last_s and output.key != "long":
                gaps_s.append(now_s - last_s[output.key])
            last_s[output.key] = now_s

    warming: list[float] = []
    for _ in range(BEFORE):
        step(warming)
    alone_s: list[float] = []
    for _ in range(BEFORE):
        step(alone_s)
    begun_s = time.perf_counter()
    served.add(spec("long", prompt(number, LONG), 2))
    beside_s: list[float] = []
    while not tokens["long"]:
        step(beside_s)
    first_s = last_s["long"] - begun_s
    for _ in range(BEFORE):
        step(alone_s)
    return _Round(alone_s, beside_s, first_s, list(tokens.values()))
