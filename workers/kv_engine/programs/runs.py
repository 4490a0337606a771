"""One live run of a program, and the outputs of programs whose results are tensors."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any, Protocol, TypeAlias

import torch

from models.programs import Driver, Going, Pass, TokenDriver, Turn
from shared.errors import BugError, WorkerError
from workers.data_plane.arrays import to_array
from workers.data_plane.port import Array
from workers.kv_engine.outputs import Output, ProgramOutput, ProgramReport, StepFailedError
from workers.kv_engine.programs.contexts import Contexts
from workers.kv_engine.programs.spec import ProgramSpec
from workers.kv_engine.programs.tokens import check_numbers
from workers.kv_engine.sequence_spec import FinishReason, SequenceSpec

AnySpec: TypeAlias = ProgramSpec | SequenceSpec


class Reports(Protocol):
    """Turns what a driver returns into outputs of the engine."""

    def output(self, taken: Any, step: int) -> Output | None:
        """Return the output of step number `step`; None while there is none. One with `finish` ends the run.

        Raises:
            DalSegnoError: the result is wrong: the run fails.
        """
        ...


@dataclass(slots=True, eq=False)
class Run:
    """A live run.

    Attributes:
        contexts: None while it waits for room.
        waiting: the passes of this round that were not computed yet, by their place in it.
        taken: the results of those that were.
        served: the number of the last step with one of its passes.
        held: it keeps its room, but takes part in no step.
        parked: it keeps its room, and waits for the node call of the next iteration.
    """

    spec: AnySpec
    driver: Driver | TokenDriver
    reports: Reports
    arrival: int
    contexts: Contexts | None = None
    waiting: dict[int, Pass] = field(default_factory=dict)
    taken: dict[int, torch.Tensor] = field(default_factory=dict)
    served: int = 0
    held: bool = False
    parked: bool = False

    @property
    def is_able(self) -> bool:
        """True if it can take part in steps, once it has its contexts."""
        return not self.held and not self.parked

    @property
    def is_due(self) -> bool:
        """True if nothing of its round is left to compute: its driver takes the results."""
        return self.contexts is not None and self.is_able and not self.waiting

    @property
    def deadline(self) -> float:
        """The deadline of its request, in ns; infinite without one."""
        ns = self.spec.deadline_ns if isinstance(self.spec, SequenceSpec) else None
        return inf if ns is None else ns

    def take(self, step: int) -> Output | None:
        """Give the driver the results of a round, all of which are there; return its output, if any.

        Raises:
            BugError: the round had no passes, but did not end the node call: it might go on so for ever.
        """
        results = [self.taken[place] for place in sorted(self.taken)]
        if isinstance(self.spec, SequenceSpec):
            check_numbers(results)
        found = self.driver.take(results)
        self.parked = isinstance(found, Turn)
        output = self.reports.output(found, step)
        if not results and not self.parked and (output is None or output.finish is None):
            raise BugError(
                f"run {self.spec.key}: its driver asked for no pass: expected outputs or a Turn from `take`"
            )
        return output

    def more(self, inputs: Mapping[str, torch.Tensor], step: int) -> Output | None:
        """Give the driver the inputs of the next iteration; return the outputs if it needs no pass.

        Raises:
            BugError: the run does not wait for any, or its driver takes none.
        """
        take = getattr(self.driver, "more", None)
        if take is None or not self.parked:
            raise BugError(
                f"run {self.spec.key}: expected a driver with a method `more` whose last result was a Turn"
            )
        found = take(inputs)
        self.parked = found is not None
        return self.reports.output(found, step)


class TensorReports:
    """The outputs and reports of a program whose results are tensors.

    Args:
        key: of the run.
        driver: its counts are read with each output.
    """

    def __init__(self, key: str, driver: Driver) -> None:
        self._key = key
        self._driver = driver

    def output(self, taken: "Mapping[str, torch.Tensor] | Going | Turn | None", step: int) -> Output | None:
        """Return an output or a report, with its tensors in main memory.

        Raises:
            WorkerError: one of them is not a number.
        """
        match taken:
            case None:
                return None
            case Going():
                return ProgramReport(
                    key=self._key,
                    progress=taken.progress,
                    previews=_arrays(taken.previews),
                    state=_arrays(taken.state),
                    step=step,
                )
            case Turn():
                return self._outputs(taken.outputs, None, step)
            case _:
                return self._outputs(taken, FinishReason.STOP, step)

    def _outputs(
        self, values: Mapping[str, torch.Tensor], finish: FinishReason | None, step: int
    ) -> ProgramOutput:
        counts = dict(getattr(self._driver, "counts", {}))
        return ProgramOutput(key=self._key, values=_arrays(values), step=step, finish=finish, counts=counts)


def _arrays(values: Mapping[str, torch.Tensor]) -> dict[str, Array]:
    broken = [
        name
        for name, value in values.items()
        if value.is_floating_point() and not bool(value.isfinite().all())
    ]
    if broken:
        raise WorkerError(
            f"the outputs {sorted(broken)} of the program are not numbers; the weights are damaged, or the "
            "dtype is too narrow for the model",
            code=StepFailedError.code,
        )
    return {name: to_array(value.clone()) for name, value in values.items()}
