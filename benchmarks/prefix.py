"""Time to the first token of 32 concurrent requests that share their first 512 tokens.

In turns: without a prefix cache; with an empty one, so that the first request computes the prefix and the
others wait for it; and with the prefix in the cache. The hit rate is compared with the one computed from the
lengths, and every answer with the one without a cache.
"""

import time
from dataclasses import dataclass
from statistics import mean
from typing import Final

from benchmarks.random_model import engine, node, prompt, spec
from benchmarks.report import RATIO, Figure, spread
from workers.kv_engine.engine import KVEngine
from workers.kv_engine.outputs import TokenOutput

REQUESTS: Final = 32
PREFIX: Final = 512
OWN: Final = 16
ANSWER: Final = 8
ROUNDS: Final = 3
_POOL: Final = 2 * REQUESTS * (PREFIX + OWN + ANSWER + 16)


@dataclass(slots=True)
class _Round:
    first_s: float
    hit_rate: float
    answers: list[list[int]]


def measure() -> list[Figure]:
    model = node(layers=4)
    _ask(engine(model, tokens=_POOL), [prompt(0, PREFIX)])
    cold: list[_Round] = []
    shared: list[_Round] = []
    warm: list[_Round] = []
    for number in range(ROUNDS):
        prefix = prompt(number, PREFIX)
        prompts = [prefix + prompt(1000 * (number + 1) + each, OWN) for each in range(REQUESTS)]
        cold.append(_ask(engine(model, tokens=_POOL, prefix_cache=False), prompts))
        shared.append(_ask(engine(model, tokens=_POOL), prompts))
        served = engine(model, tokens=_POOL)
        _ask(served, [[*prefix, 0]])
        warm.append(_ask(served, prompts))
    figures: list[Figure] = []
    # Either the first request computes the prefix, or none does.
    for name, rounds, misses in (("nothing cached yet", shared, 1), ("the prefix cached", warm, 0)):
        by_hand = (REQUESTS - misses) * PREFIX / (REQUESTS * (PREFIX + OWN))
        gains = [one.first_s / other.first_s for one, other in zip(cold, rounds, strict=True)]
        figures += [
            spread(f"first token: without a cache / {name}", gains, RATIO),
            spread(f"first token, {name}", [1e3 * one.first_s for one in rounds], "ms"),
            spread(f"hit rate, {name}", [one.hit_rate for one in rounds], "", f"computed {by_hand:.4f}"),
        ]
        others = sum(
            mine != plain
            for one, other in zip(rounds, cold, strict=True)
            for mine, plain in zip(one.answers, other.answers, strict=True)
        )
        figures += [Figure(f"answers that differ, {name}", others, "", f"of {REQUESTS * ROUNDS}")]
    return [*figures, spread("first token, without a cache", [1e3 * one.first_s for one in cold], "ms")]


def _ask(served: KVEngine, prompts: list[list[int]]) -> _Round:
    counts = served.stats().cache
    asked, hit = counts.queries, counts.hits
    begun_s = time.perf_counter()
    for number, ids in enumerate(prompts):
        served.add(spec(str(number), ids, ANSWER))
    first_s: dict[str, float] = {}
    answers: dict[str, list[int]] = {str(number): [] for number in range(len(prompts))}
    while served.has_work:
        for output in served.step():
            assert isinstance(output, TokenOutput)
            first_s.setdefault(output.key, time.perf_counter() - begun_s)
            answers[output.key].append(output.token_id)
    return _Round(
        first_s=mean(first_s.values()),
        hit_rate=(counts.hits - hit) / (counts.queries - asked),
        answers=list(answers.values()),
    )
