"""The scheduler alone, without a model: how many steps a second can it decide, with 1,000 sequences running?

All of them decode; or some end and others begin in every step, so that it admits, matches prefixes, and cuts
prompts as well; or the pool is too small for all, and it preempts. What is timed is `schedule` and `advance`,
and the token that each sequence gets, nothing else.
"""

import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import Final

from benchmarks.report import Figure, spread
from workers.kv_engine.cache.blocks import BlockManager
from workers.kv_engine.scheduler import Scheduler
from workers.kv_engine.sequence import Sequence
from workers.kv_engine.sequence_spec import SequenceSpec

RUNNING: Final = 1000
STEPS: Final = 100
ROUNDS: Final = 5
_PROMPT: Final = 64
_SHARED: Final = 48
_BLOCK: Final = 16


def measure() -> list[Figure]:
    figures: list[Figure] = []
    for name, make in (
        ("all decode", _decoding),
        ("1 in 100 ends in each step, and another begins", _coming_and_going),
        ("the pool holds nine tenths of them", _crowded),
    ):
        rates: list[float] = []
        preempted = 0
        for _ in range(ROUNDS):
            scheduler, step = make()
            begun_s = time.perf_counter()
            for _ in range(STEPS):
                step()
            rates.append(STEPS / (time.perf_counter() - begun_s))
            preempted += scheduler.counters.preemptions
        note = f"{preempted} preempted" if preempted else ""
        figures.append(spread(f"{RUNNING} running, {name}", rates, "/s", note))
    return figures


_Made = tuple[Scheduler, Callable[[], None]]


def _decoding() -> _Made:
    return _made(blocks=RUNNING * 32, max_tokens=lambda _: 10_000)


def _coming_and_going() -> _Made:
    # Their ends are spread out evenly.
    return _made(
        blocks=RUNNING * 32, max_tokens=lambda number: 20 + number % 100 if number < RUNNING else 100
    )


def _crowded() -> _Made:
    return _made(blocks=RUNNING * 10 * 9 // 10, max_tokens=lambda _: 96, shared=0)


def _made(*, blocks: int, max_tokens: Callable[[int], int], shared: int = _SHARED) -> _Made:
    scheduler = Scheduler(
        BlockManager(blocks, _BLOCK), max_sequences=RUNNING, max_step_tokens=4096, max_positions=16_384
    )
    numbers = count()

    def add() -> None:
        number = next(numbers)
        own = [1000 + number * _PROMPT + place for place in range(_PROMPT - shared)]
        ids = [*range(shared), *own]
        scheduler.add(Sequence(SequenceSpec(key=str(number), prompt_ids=ids, max_tokens=max_tokens(number))))

    def step() -> None:
        spans = scheduler.schedule()
        scheduler.advance(spans)
        ended = list(_sampled(scheduler, (span.sequence for span in spans if span.samples)))
        for _ in ended:
            add()

    for _ in range(RUNNING):
        add()
    # Until everybody is there, or nobody else has room.
    while any(sequence.pending > 1 for sequence in scheduler.running) or not scheduler.running:
        step()
    return scheduler, step


def _sampled(scheduler: Scheduler, sequences: Iterator[Sequence]) -> Iterator[Sequence]:
    """Give each its token; those that have ended by it."""
    for sequence in list(sequences):
        sequence.ids.append(7)
        if sequence.generated == sequence.spec.max_tokens:
            scheduler.remove(sequence)
            yield sequence
