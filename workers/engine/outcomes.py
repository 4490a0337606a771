"""What the engine reports beside tokens: its counters, and steps that failed. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from shared.errors import WorkerError
from workers.engine.sequence import TokenOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """The engine as it is now. `kv_used` and `kv_total` count tokens, reserved ones included."""

    forwards: int = 0
    running: int = 0
    waiting: int = 0
    kv_used: int = 0
    kv_total: int = 0


class StepFailedError(WorkerError):
    """A step failed for some sequences. They are gone from the engine, which goes on with the rest.

    Attributes:
        keys: the sequences that failed.
        outputs: the tokens of those in the same step that did not.
    """

    code = "step_failed"

    def __init__(self, message: str, *, keys: Sequence[str], outputs: Sequence[TokenOutput] = ()) -> None:
        super().__init__(message)
        self.keys: Final = tuple(keys)
        self.outputs: Final = list(outputs)
