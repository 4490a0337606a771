"""What the engine reports beside tokens: its counters, and steps that failed. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from shared.errors import DalSegnoError, WorkerError
from shared.histogram import ROWS, SECONDS, Histogram
from workers.engine.sequence import Output


@dataclass(slots=True)
class Work:
    """What the engine has done since it was made; what the fields mean is in `shared.meters`.

    Counted in the engine's thread and read beside it: between two reads one of them may be a step ahead.
    """

    sequences: int = 0
    computed_tokens: int = 0
    sampled_tokens: int = 0
    batch_rows: Histogram = field(default_factory=lambda: Histogram.over(ROWS))
    step_s: Histogram = field(default_factory=lambda: Histogram.over(SECONDS))

    def count_step(self, *, rows: int, computed: int, sampled: int, took_s: float) -> None:
        """A step has come to its end."""
        self.computed_tokens += computed
        self.sampled_tokens += sampled
        self.batch_rows.observe(rows)
        self.step_s.observe(took_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """The engine as it is now. `kv_used` and `kv_total` count tokens, reserved ones included.

    `held` are of those that run. `work` is the living object, not a copy.
    """

    forwards: int = 0
    running: int = 0
    waiting: int = 0
    held: int = 0
    kv_used: int = 0
    kv_total: int = 0
    work: Work = field(default_factory=Work)


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
