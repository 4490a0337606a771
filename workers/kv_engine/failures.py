"""Failures of engine steps: the sequences that failed, the error of each, and the outputs of the others."""

from collections.abc import Mapping, Sequence
from typing import Final

from shared.errors import DalSegnoError, WorkerError
from workers.kv_engine.outputs import Output


class StepFailedError(WorkerError):
    """A step failed for some of its sequences. The engine has removed them and continues with the rest.

    Attributes:
        keys: the sequences that failed with this error.
        others: the sequences that failed with an error of their own.
        outputs: the outputs of the step for the other sequences.
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
    """Return the error as one that may fail a single sequence."""
    if isinstance(error, DalSegnoError):
        return error
    return WorkerError(f"{type(error).__name__}: {error}", code=StepFailedError.code)
