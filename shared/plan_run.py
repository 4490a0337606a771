"""The execution of a request's plan as far as its recorded results reach.

The conductor's state holds no generators, because they cannot be copied. It holds the recorded results, and a
`PlanRun` is a cache that rebuilds the generators by feeding the results to them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec

from shared.errors import BugError
from shared.plans import Chain, Finish, Join, Planner, PlanRequest, Start, Step, StepResult, SubPlan, Walk


class PendingStep(msgspec.Struct, frozen=True):
    """A step that the plan has yielded and that has no recorded result yet.

    Attributes:
        index: counts the run's steps, from 0, in the order in which the plan yielded them.
        partition: the sub-plan that yielded it; empty for the plan itself.
        ends: streams that end with it.
        position: the number of earlier steps of the same sub-plan. It is equal in all runs, whereas the index
            depends on which of several sub-plans was faster.
    """

    index: int
    partition: str
    walks: tuple[Walk, ...]
    ends: tuple[str, ...] = ()
    position: int = 0


RecordedResult: TypeAlias = tuple[int, StepResult]
"""A step's index, and its result."""


@dataclass(slots=True, eq=False)
class _RunningPlan:
    """The running generator of the plan or of a sub-plan.

    Attributes:
        steps: the number of steps that it has yielded.
        started: its sub-plans that it has not joined.
        joins: the sub-plan that it waits for.
        done: it has returned `value`.
    """

    name: str
    plan: SubPlan
    parent: "_RunningPlan | None" = None
    steps: int = 0
    started: dict[str, "_RunningPlan"] = field(default_factory=dict)
    joins: str | None = None
    done: bool = False
    value: Any = None

    def __str__(self) -> str:
        return f"the sub-plan {self.name!r}" if self.name else "the plan"


class PlanRun:
    """The run of one request's plan.

    `advance` feeds new results; after a restart it feeds all results again, into new generators. Errors that
    the plan or a sub-plan raises pass through.
    """

    def __init__(self, planner: Planner, request: PlanRequest) -> None:
        self._planner = planner
        self._request = request
        self._root: _RunningPlan | None = None
        self._fed: list[RecordedResult] = []

    def advance(self, results: Sequence[RecordedResult]) -> tuple[PendingStep, ...] | Finish:
        """Return the pending steps after `results`, ordered by index, or the plan's return value.

        Args:
            results: the results of the run's steps, in the order of the log.

        Raises:
            BugError: the plan breaks a rule, or the results do not belong to its steps.
        """
        fed = len(self._fed)
        try:
            if self._root is None or [*results[:fed]] != self._fed:
                self._begin()
                fed = 0
            for index, result in results[fed:]:
                self._feed(index, result)
        except BaseException:
            self._root = None  # a generator that raised cannot continue: the next call starts again
            raise
        if self._finish is not None:
            return self._finish
        return tuple(step for _, step in self._pending.values())

    # ---- going back --------------------------------------------------------------------------------
    def results_before(self, index: int) -> int | None:
        """Return the number of results before the plan yielded step `index`; None if it never did."""
        return self._results_before[index] if index < len(self._results_before) else None

    def restart_point(self, count: int) -> int:
        """Return the largest number of results, up to `count`, at which no sub-plan was running.

        Stream items between sub-plans are part of no result. So an execution that is repeated starts there.
        """
        return self._restart_points[count]

    # ---- running -----------------------------------------------------------------------------------
    def _begin(self) -> None:
        self._fed = []
        self._finish: Finish | None = None
        self._pending: dict[int, tuple[_RunningPlan, PendingStep]] = {}
        self._results_before: list[int] = []  # by step
        self._names: set[str] = set()
        self._unjoined = 0
        self._restart_points: list[int] = []  # by number of results
        self._unjoined_since = 0
        self._root = _RunningPlan("", self._planner.plan(self._request))
        self._send(self._root, None)
        self._restart_points.append(self._unjoined_since if self._unjoined else 0)

    def _feed(self, index: int, result: StepResult) -> None:
        if self._finish is not None:
            raise BugError("the plan returned although more results are recorded")
        if index not in self._pending:
            raise BugError(
                f"a result of step {index} is recorded, but the pending steps are {sorted(self._pending)}"
            )
        run, _ = self._pending.pop(index)
        self._fed.append((index, result))
        self._send(run, result)
        count = len(self._fed)
        self._restart_points.append(self._unjoined_since if self._unjoined else count)

    def _send(self, run: _RunningPlan, value: object) -> None:
        """Send `value` to a generator and run it until it waits or returns."""
        while True:
            try:
                yielded = run.plan.send(value)
            except StopIteration as stop:
                self._returned(run, stop.value)
                return
            match yielded:
                case Walk() | Chain():
                    self._add_pending(run, yielded)
                    return
                case Start():
                    self._start(run, yielded)
                    value = None
                case Join(name):
                    if name not in run.started:
                        raise BugError(
                            f"{run} joins {name!r}; started and not joined are {sorted(run.started)}"
                        )
                    if not run.started[name].done:
                        run.joins = name
                        return
                    value = self._join(run, name)
                case _:
                    raise BugError(f"{run} may yield a Walk, Chain, Start or Join, not {yielded!r}")

    def _add_pending(self, run: _RunningPlan, step: Step) -> None:
        index = len(self._results_before)
        walks = step.walks if isinstance(step, Chain) else (step,)
        self._results_before.append(len(self._fed))
        ends = tuple(dict.fromkeys(step.ends))
        self._pending[index] = (run, PendingStep(index, run.name, walks, ends, run.steps))
        run.steps += 1

    def _start(self, run: _RunningPlan, start: Start) -> None:
        if not start.name or start.name in self._names:
            found = "without a name" if not start.name else f"as {start.name!r}, which was started before"
            raise BugError(f"{run} starts a sub-plan {found}; give each sub-plan a unique name")
        if not self._unjoined:
            self._unjoined_since = len(self._fed)
        self._names.add(start.name)
        self._unjoined += 1
        child = run.started[start.name] = _RunningPlan(start.name, start.plan, run)
        self._send(child, None)

    def _join(self, run: _RunningPlan, name: str) -> object:
        self._unjoined -= 1
        return run.started.pop(name).value

    def _returned(self, run: _RunningPlan, value: object) -> None:
        if run.started:
            raise BugError(f"{run} returned, but has not joined {sorted(run.started)}")
        if run.parent is None:
            if not isinstance(value, Finish):
                raise BugError(f"a plan must return a Finish, not {value!r}")
            self._finish = value
            return
        run.done, run.value = True, value
        if run.parent.joins == run.name:
            run.parent.joins = None
            self._send(run.parent, self._join(run.parent, run.name))
