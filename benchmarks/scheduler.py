"""Steps per second of the scheduler alone, without a model, with 1,000 running sequences.

Three cases: all sequences decode; some end and others start in every step, so that it also admits, matches
prefixes and splits prompts; the pool is too small for all, and it preempts. Only `schedule`, `advance` and
the token of each sequence are timed.
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
        ("1 of 100 ends and another starts in each step", _coming_and_going),
        ("the pool has room for nine tenths", _crowded),
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
    # The ends are spread evenly over the steps.
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
    # Until all sequences run, or no further one has room.
    while any(sequence.pending > 1 for sequence in scheduler.running) or not scheduler.running:
        step()
    return scheduler, step


def _sampled(scheduler: Scheduler, sequences: Iterator[Sequence]) -> Iterator[Sequence]:
    """Give each sequence its token; yield those that ended with it."""
    for sequence in list(sequences):
        sequence.ids.append(7)
        if sequence.generated == sequence.spec.max_tokens:
            scheduler.remove(sequence)
            yield sequence
