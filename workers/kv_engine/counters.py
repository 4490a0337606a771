"""What the engine reports beside tokens: its counters, and steps that failed. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from shared.errors import DalSegnoError, WorkerError
from shared.telemetry.histogram import ROWS, SECONDS, Histogram
from workers.kv_engine.outputs import Output


@dataclass(slots=True)
class WorkCounters:
    """What the engine has done since it was made; what the fields mean is in `shared.meters`.

    Counted in the engine's thread and read beside it: between two reads one of them may be a step ahead.

    Attributes:
        ahead: steps that were launched before the one before was read; `discarded_tokens`, tokens they came to of
            sequences that were gone by then, or held. Not in the meters.
    """

    sequences: int = 0
    computed_tokens: int = 0
    sampled_tokens: int = 0
    ahead: int = 0
    discarded_tokens: int = 0
    batch_rows: Histogram = field(default_factory=lambda: Histogram.over(ROWS))
    step_s: Histogram = field(default_factory=lambda: Histogram.over(SECONDS))

    def count_step(self, *, rows: int, computed: int, sampled: int, took_s: float) -> None:
        """A step has come to its end."""
        self.computed_tokens += computed
        self.sampled_tokens += sampled
        self.batch_rows.observe(rows)
        self.step_s.observe(took_s)


@dataclass(slots=True)
class CacheCounters:
    """What cache and guesses have saved, and what had to be given up, since the engine was made.

    Attributes:
        asked: tokens of sequences that were let in; `hit`, those that were cached.
        preempted: how often a sequence had to give its blocks back.
        guessed: tokens that were guessed; `stood`, those that were what the model said.
    """

    queries: int = 0
    hits: int = 0
    preemptions: int = 0
    drafted: int = 0
    accepted: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """The engine as it is now. `kv_used`, `kv_evictable` and `kv_total` count tokens, whole blocks of them.

    `kv_evictable` are cached and in nobody's use: room for whoever needs it. `held` are of those that run. `work`
    and `cache` are the living objects, not copies. `kernels` is who computes the layers (`Node.kernels`).
    """

    kernels: str = ""
    forwards: int = 0
    running: int = 0
    waiting: int = 0
    held: int = 0
    kv_used: int = 0
    kv_evictable: int = 0
    kv_total: int = 0
    cache: CacheCounters = field(default_factory=CacheCounters)
    work: WorkCounters = field(default_factory=WorkCounters)


class StepFailedError(WorkerError):
    """A step failed for some sequences. They are gone from the engine, which goes on with the rest.

    Attributes:
        keys: the sequences that failed of what this error says.
        others: those that failed of something of their own.
        outputs: what came of those in the same step that did not.
    """

    code = "step_failed"

    def __init__(
        self,
        message: str,
        *,
        keys: Sequence[str],
        outputs: Sequence[Output] = (),
        others: Mapping[str, DalSegnoError] | None = None,
    ) -> None:
        super().__init__(message)
        self.keys: Final = tuple(keys)
        self.others: Final = dict(others or {})
        self.outputs: Final = list(outputs)


def as_dalsegno_error(error: Exception) -> DalSegnoError:
    """An error as the one sequence is told that failed of it."""
    if isinstance(error, DalSegnoError):
        return error
    return WorkerError(f"{type(error).__name__}: {error}", code=StepFailedError.code)
