"""Runs of stepped nodes (`models.stepped`): started, computed forward by forward, and ended. No torch.

    add ── begin ── call ── advance ── call ── advance ── ... ── ended
                     └── a report: progress, previews, a checkpoint

The thread of the stateless engine calls `step` in turn with the batches of other nodes. A run that is
cancelled is closed before its next call.
"""

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from shared.errors import DalSegnoError
from shared.meters import StepMeters
from workers.stateless_engine.firing import FiringReport, FiringResult, StatelessFiring
from workers.stateless_engine.step_order import StepOrder


@dataclass(slots=True, eq=False)
class StepOf:
    """A call of a run that waits to be computed.

    Attributes:
        group, cost: of the call (`models.stepped.Call`).
    """

    group: Hashable
    cost: float


@dataclass(slots=True, eq=False)
class Progressed:
    """The outcome of one advance of a run.

    Attributes:
        report: what the run has reported; None for nothing.
        next: the call that it needs, or its end.
    """

    next: StepOf | FiringResult | DalSegnoError
    report: FiringReport | None = None


class Run(Protocol):
    """A run with its tensors (`workers.stateless_engine.stepper.TorchRun`)."""

    def close(self) -> None: ...


class Stepper(Protocol):
    """A stepped node on its device (`workers.stateless_engine.stepper.TorchStepper`)."""

    @property
    def max_batch(self) -> int: ...
    @property
    def max_runs(self) -> int: ...
    @property
    def max_cost(self) -> float: ...

    def begin(self, firing: StatelessFiring) -> tuple[Run, Progressed]:
        """Start a run, and compute up to its first call."""
        ...

    def advance(self, runs: Sequence[Run]) -> list[Progressed]:
        """Compute the calls of runs in one forward, and each run up to its next call."""
        ...


class PendingRun(Protocol):
    """An execution of a stepped node that a caller waits for."""

    def __hash__(self) -> int: ...
    @property
    def firing(self) -> StatelessFiring: ...
    @property
    def is_cancelled(self) -> bool: ...


class SteppedRuns:
    """The runs of one stepped node.

    Args:
        report: called with the reports of a run.
        end: called with the end of a run.
    """

    def __init__(
        self,
        stepper: Stepper,
        *,
        report: Callable[[PendingRun, FiringReport], None],
        end: Callable[[PendingRun, FiringResult | DalSegnoError], None],
    ) -> None:
        self._stepper = stepper
        self._report = report
        self._end = end
        self._order = StepOrder[PendingRun](
            max_batch=stepper.max_batch, max_runs=stepper.max_runs, max_cost=stepper.max_cost
        )
        self._runs: dict[PendingRun, Run] = {}
        self.meters: Final = StepMeters()

    def __len__(self) -> int:
        """Return the number of runs, those that wait to be started included."""
        return len(self._order)

    def add(self, pending: PendingRun) -> None:
        """Queue an execution."""
        self._order.add(pending)

    def step(self) -> int:
        """Start a run, if one may start, and compute one forward; return the number of its calls."""
        calls = self._stepped()
        self.meters.runs = len(self)
        return calls

    def _stepped(self) -> int:
        self._drop_cancelled()
        if (new := self._order.next_start()) is not None:
            new.firing.work.admit()
            self._runs[new], found = self._stepper.begin(new.firing)
            self._note(new, found)
        if not (batch := self._order.take()):
            return 0
        begun_s = time.perf_counter()
        found_all = self._stepper.advance([self._runs[pending] for pending in batch])
        self._learn(len(batch), time.perf_counter() - begun_s)
        for pending in batch:
            pending.firing.work.count_step(len(batch))
        for pending, found in zip(batch, found_all, strict=True):
            self._note(pending, found)
        return len(batch)

    def _learn(self, calls: int, seconds: float) -> None:
        self.meters.gain = self._order.learn(calls, seconds)
        self.meters.calls.observe(calls)
        self.meters.step_s.observe(seconds)

    def close(self) -> None:
        """Close all runs."""
        for run in self._runs.values():
            run.close()
        self._runs.clear()

    def _drop_cancelled(self) -> None:
        for pending in [one for one in self._order if one.is_cancelled]:
            self._drop(pending)

    def _drop(self, pending: PendingRun) -> None:
        self._order.drop(pending)
        if (run := self._runs.pop(pending, None)) is not None:
            run.close()

    def _note(self, pending: PendingRun, found: Progressed) -> None:
        if found.report is not None:
            self._report(pending, found.report)
        if isinstance(found.next, StepOf):
            self._order.ask(pending, found.next.group, found.next.cost)
            return
        self._drop(pending)
        self._end(pending, found.next)
