"""What the record of each sequence's work costs: tokens per second of an engine with and without it.

Rounds with and without the record alternate, so that both meet the machine's moods. In each, sequences wait,
are admitted, and are computed beside others' prompts. Two additions per step count steps and rows in both.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Final

from benchmarks import random_model
from benchmarks.report import RATIO, Figure, spread
from workers.kv_engine.engine import KVEngine
from workers.kv_engine.outputs import TokenOutput
from workers.threads.engine_work import EngineWork, Lack, Prompts, StepCounts

ROUNDS: Final = 12
_REQUESTS: Final = 48
_PROMPT: Final = 48
_TOKENS: Final = 48


def measure() -> list[Figure]:
    node = random_model.node()
    figures, seeds = list[Figure](), count()
    for at_once in (1, 8, 32):
        engine = random_model.engine(node, tokens=16_384, max_sequences=at_once)
        _round(engine, at_once, next(seeds), is_recorded=True)
        rates: dict[bool, list[float]] = {True: [], False: []}
        for number in range(ROUNDS):
            for is_recorded in (True, False) if number % 2 else (False, True):
                rates[is_recorded].append(_round(engine, at_once, next(seeds), is_recorded=is_recorded))
        pairs = [ours / bare for ours, bare in zip(rates[True], rates[False], strict=True)]
        best = max(rates[True]) / max(rates[False])
        note = f"{min(pairs):.3f} to {max(pairs):.3f} in {ROUNDS} pairs; of the best rounds {best:.3f}"
        name, middle = f"{at_once} at once: tokens/s with and without", statistics.median(pairs)
        figures.append(Figure(name, middle, RATIO, note))
        figures.append(spread(f"{at_once} at once, with the record", rates[True], "tok/s"))
    return figures


def _round(engine: KVEngine, at_once: int, seed: int, *, is_recorded: bool) -> float:
    """Return the tokens per second of one round; each seed has other prompts."""
    prompts = engine._scheduler._prompts
    if not is_recorded:
        engine._scheduler._prompts = _NoPrompts(StepCounts())
    waiting = []
    for number in range(_REQUESTS if at_once > 1 else 4):
        prompt = random_model.prompt(seed * _REQUESTS + number, _PROMPT)
        one = random_model.spec(str(number), prompt, _TOKENS)
        waiting.append(one if is_recorded else replace(one, work=_NoWork()))
    begun_s = time.perf_counter()
    for one in waiting:
        one.work.queue()
        engine.add(one)
    works = {one.key: one.work for one in waiting}
    missing = dict.fromkeys(works, _TOKENS)
    while missing:
        for output in engine.step():
            assert isinstance(output, TokenOutput)
            works[output.key].token()
            missing[output.key] -= 1
            if not missing[output.key]:
                del missing[output.key]
    took_s = time.perf_counter() - begun_s
    engine._scheduler._prompts = prompts
    return len(waiting) * _TOKENS / took_s


class _NoWork(EngineWork):
    """A record into which nothing is written."""

    def queue(self) -> None: ...
    def token(self) -> None: ...
    def wait_for(self, lack: Lack, behind: Sequence[str]) -> None: ...
    def admit(self, *, cached: int = 0, computed: int = 0) -> None: ...
    def take_place(self, counts: StepCounts) -> None: ...
    def decode(self, counts: StepCounts) -> None: ...
    def leave_place(self) -> None: ...
    def end(self) -> None: ...


class _NoPrompts(Prompts):
    """Prompts that are not remembered."""

    def add(self, took_s: float, prompts: Sequence[tuple[str, int]]) -> None: ...
    def note_beside(self, key: str, work: EngineWork) -> None: ...
