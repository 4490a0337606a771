"""Plans: which walk comes next, written as ordinary code.

A plan is a generator the conductor runs. Each `yield` is a `Walk` or a `Chain`; what comes back is a
`StepResult`: facts and opaque handles, never tensor values. It returns a `Finish`, or raises a
`ClientError` that fails the request with a typed error. It must depend on its request and on what came
back, on nothing else: no clock, no chance, no I/O.

Parts of a model that run at the same time are sub-plans, generators like the plan itself: `Start` begins
one and comes back at once, `Join` waits for it and comes back with what it returned. Each of them is a
*partition* of the journey, with one step at hand at a time; their steps' results count in the order in
which the log has them:

    yield Start("talker", talk(request))        its first step is at hand from here on
    heard = yield Walk("listen")                at the same time
    spoken = yield Join("talker")               waits, unless it has returned already

State never holds a generator (it cannot be copied): state is the list of steps and their results, as they
were recorded, and the generators a cache rebuilt by feeding them back (`Journey`).
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeAlias, TypeVar

import msgspec

from shared.errors import BugError
from shared.events import Inputs, Limits, OutputTotals, Params, Usage, WalkCall, WalkResult
from shared.tensors import Handle

_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final[msgspec.msgpack.Decoder[dict[str, Any]]] = msgspec.msgpack.Decoder(dict[str, Any])
_Facts = TypeVar("_Facts", bound=msgspec.Struct)


class Walk(msgspec.Struct, frozen=True):
    """An order to run one graph walk.

    Attributes:
        inputs: tensors, by edge.
        args: plain values: a mapping, or a struct such as `models.sequence_request.SequenceRequest`.
        ends: streams that end with this step: no item follows the items it sends.
    """

    name: str
    inputs: Mapping[str, Handle] = {}
    args: Mapping[str, Any] | msgspec.Struct = {}
    ends: tuple[str, ...] = ()

    def call(self) -> WalkCall:
        """The order as an event carries it, with `args` as a decoder returns them."""
        plain = self.args if isinstance(self.args, msgspec.Struct) else dict(self.args)
        args = _DECODER.decode(_ENCODER.encode(plain))
        return WalkCall(name=self.name, inputs=dict(self.inputs), args=args)


@dataclass(frozen=True, slots=True)
class Chain:
    """Walks run one after the other without asking the conductor in between.

    `ends` names streams that end with this step; the walks' own are among them.
    """

    walks: tuple[Walk, ...]
    ends: tuple[str, ...] = ()

    def __init__(self, *walks: Walk, ends: Sequence[str] = ()) -> None:
        if not walks:
            raise ValueError("a Chain needs at least one Walk")
        named = (*(end for walk in walks for end in walk.ends), *ends)
        object.__setattr__(self, "walks", walks)
        object.__setattr__(self, "ends", tuple(dict.fromkeys(named)))


Step: TypeAlias = Walk | Chain


@dataclass(frozen=True, slots=True, eq=False)
class Start:
    """Begin the sub-plan `plan`, just made, under a name of its own; `Join` it before returning."""

    name: str
    plan: "SubPlan"


@dataclass(frozen=True, slots=True)
class Join:
    """Wait for a sub-plan this plan has started; comes back with what it returned."""

    name: str


class StepResult(msgspec.Struct, frozen=True):
    """What one step came to: the results of its walks, by name, and what was put out so far."""

    walks: tuple[WalkResult, ...]
    output: OutputTotals = OutputTotals()

    def fact(self, name: str) -> Any:
        """The fact `name`, of the last walk that has it."""
        for walk in reversed(self.walks):
            if name in walk.facts:
                return walk.facts[name]
        known = sorted({fact for walk in self.walks for fact in walk.facts})
        raise BugError(f"no walk of this step reported the fact {name!r}; reported were {known}")

    def facts_as(self, kind: type[_Facts]) -> _Facts:
        """All facts of the step as one struct; of a fact that several walks report, the last one counts.

        Raises:
            BugError: a fact is missing, or has the wrong type.
        """
        facts = {name: value for walk in self.walks for name, value in walk.facts.items()}
        try:
            return msgspec.convert(facts, kind)
        except msgspec.ValidationError as error:
            raise BugError(
                f"the facts of this step are no {kind.__name__}: {error}; reported were {sorted(facts)}"
            ) from error

    def handle(self, name: str) -> Handle:
        """The handle of the output `name`, of the last walk that has it."""
        for walk in reversed(self.walks):
            if name in walk.outputs:
                return walk.outputs[name]
        known = sorted({out for walk in self.walks for out in walk.outputs})
        raise BugError(f"no walk of this step put out {name!r}; put out were {known}")


class Finish(msgspec.Struct, frozen=True, kw_only=True):
    """The plan's return: what the request used, and how each choice ended."""

    usage: Usage
    finish_reasons: tuple[str, ...]


class PlanRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan knows of its request."""

    request_id: str
    inputs: Inputs
    params: Params
    limits: Limits
    seed: int


SubPlan: TypeAlias = Generator[Step | Start | Join, Any, Any]
"""A plan beside the plan: to a step comes back its `StepResult`; what it returns is its `Join`'s."""
Plan: TypeAlias = Generator[Step | Start | Join, Any, Finish]


class Planner(Protocol):
    """The part of a model's graph the conductor needs to plan with."""

    def plan(self, request: PlanRequest) -> Plan:
        """A new run of the plan for `request`."""
        ...


class PendingStep(msgspec.Struct, frozen=True):
    """A step that the results so far lead to, and whose own result is not among them.

    Attributes:
        index: counts the journey's steps, from 0, in the order in which they came to hand.
        partition: the sub-plan whose step it is; empty for the plan itself.
        ends: streams that end with it.
        position: how many steps of the same sub-plan came before it: the same in every run, whereas the
            index depends on which of several sub-plans was quicker.
    """

    index: int
    partition: str
    walks: tuple[Walk, ...]
    ends: tuple[str, ...] = ()
    position: int = 0


Recorded: TypeAlias = tuple[int, StepResult]
"""A step's index, and what it came to."""


@dataclass(slots=True, eq=False)
class _Run:
    """One generator on its way: the plan, or a sub-plan.

    Attributes:
        started: its own sub-plans that it has not joined.
        joins: the one it waits for.
        done: it returned, and `value` is what.
        steps: how many it has asked for.
    """

    name: str
    plan: SubPlan
    parent: "_Run | None" = None
    steps: int = 0
    started: dict[str, "_Run"] = field(default_factory=dict)
    joins: str | None = None
    done: bool = False
    value: Any = None


class Journey:
    """One request's plan, run as far as its results reach.

    `advance` feeds what is new; after a restart it feeds everything again, into generators made anew.
    Errors raised by the plan or by a sub-plan pass through.
    """

    def __init__(self, planner: Planner, request: PlanRequest) -> None:
        self._planner = planner
        self._request = request
        self._root: _Run | None = None
        self._fed: list[Recorded] = []

    def advance(self, results: Sequence[Recorded]) -> tuple[PendingStep, ...] | Finish:
        """The steps at hand behind `results`, in order of their indices; or the plan's return.

        Args:
            results: those of the journey's steps, in the order in which the log has them.

        Raises:
            BugError: the plan does not keep to the rules, or the results are not of its steps.
        """
        fed = len(self._fed)
        try:
            if self._root is None or [*results[:fed]] != self._fed:
                self._begin()
                fed = 0
            for index, result in results[fed:]:
                self._feed(index, result)
        except BaseException:
            self._root = None  # generators that raised cannot go on: begin anew, if asked again
            raise
        if self._finish is not None:
            return self._finish
        return tuple(step for _, step in self._waiting.values())

    # ---- going back --------------------------------------------------------------------------------
    def before(self, index: int) -> int | None:
        """How many of the results there were when the step `index` came to hand; None if it never did."""
        return self._came[index] if index < len(self._came) else None

    def alone(self, count: int) -> int:
        """The most results, of the first `count`, behind which no sub-plan was under way before.

        Items that go from one sub-plan to another are nobody's result: what is to be run again begins
        there.
        """
        return self._alone[count]

    # ---- running -----------------------------------------------------------------------------------
    def _begin(self) -> None:
        self._fed = []
        self._finish: Finish | None = None
        self._waiting: dict[int, tuple[_Run, PendingStep]] = {}
        self._came: list[int] = []
        self._names: set[str] = set()
        self._unjoined = 0
        self._alone: list[int] = []
        self._since = 0
        self._root = _Run("", self._planner.plan(self._request))
        self._go(self._root, None)
        self._alone.append(self._since if self._unjoined else 0)

    def _feed(self, index: int, result: StepResult) -> None:
        if self._finish is not None:
            raise BugError("the plan returned although more results are recorded")
        if index not in self._waiting:
            raise BugError(
                f"a result of step {index} is recorded, but at hand are the steps {sorted(self._waiting)}"
            )
        run, _ = self._waiting.pop(index)
        self._fed.append((index, result))
        self._go(run, result)
        count = len(self._fed)
        self._alone.append(self._since if self._unjoined else count)

    def _go(self, run: _Run, answer: object) -> None:
        """Answer what `run` yielded last, and let it go on until it waits or returns."""
        while True:
            try:
                asked = run.plan.send(answer)
            except StopIteration as stop:
                self._returned(run, stop.value)
                return
            match asked:
                case Walk() | Chain():
                    self._come(run, asked)
                    return
                case Start():
                    self._start(run, asked)
                    answer = None
                case Join(name):
                    if name not in run.started:
                        raise BugError(
                            f"{_called(run)} joins {name!r}; started and not joined are {sorted(run.started)}"
                        )
                    if not run.started[name].done:
                        run.joins = name
                        return
                    answer = self._join(run, name)
                case _:
                    raise BugError(f"{_called(run)} may yield a Walk, Chain, Start or Join, not {asked!r}")

    def _come(self, run: _Run, step: Step) -> None:
        index = len(self._came)
        walks = step.walks if isinstance(step, Chain) else (step,)
        self._came.append(len(self._fed))
        ends = tuple(dict.fromkeys(step.ends))
        self._waiting[index] = (run, PendingStep(index, run.name, walks, ends, run.steps))
        run.steps += 1

    def _start(self, run: _Run, start: Start) -> None:
        if not start.name or start.name in self._names:
            found = "without a name" if not start.name else f"as {start.name!r}, which was started before"
            raise BugError(f"{_called(run)} starts a sub-plan {found}; give each a name of its own")
        if not self._unjoined:
            self._since = len(self._fed)
        self._names.add(start.name)
        self._unjoined += 1
        child = run.started[start.name] = _Run(start.name, start.plan, run)
        self._go(child, None)

    def _join(self, run: _Run, name: str) -> object:
        self._unjoined -= 1
        return run.started.pop(name).value

    def _returned(self, run: _Run, value: object) -> None:
        if run.started:
            raise BugError(f"{_called(run)} returned, but has not joined {sorted(run.started)}")
        if run.parent is None:
            if not isinstance(value, Finish):
                raise BugError(f"a plan must return a Finish, not {value!r}")
            self._finish = value
            return
        run.done, run.value = True, value
        if run.parent.joins == run.name:
            run.parent.joins = None
            self._go(run.parent, self._join(run.parent, run.name))


def _called(run: _Run) -> str:
    return f"the sub-plan {run.name!r}" if run.name else "the plan"
