"""Plans: which walk comes next, written as ordinary code.

A plan is a generator the conductor runs. Each `yield` is a `Walk` or a `Chain`; what comes back is a
`StepResult`: facts and opaque handles, never tensor values. It returns a `Finish`, or raises a
`ClientError` that fails the request with a typed error. It must depend on its request and on what came
back, on nothing else: no clock, no chance, no I/O.

State never holds a generator (it cannot be copied): state is the list of step results, and the
generator a cache rebuilt by feeding them back (`Journey`).
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias

import msgspec

from shared.errors import BugError
from shared.events import Inputs, Limits, OutputTotals, Params, Usage, WalkCall, WalkResult
from shared.tensors import Handle

_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final[msgspec.msgpack.Decoder[dict[str, Any]]] = msgspec.msgpack.Decoder(dict[str, Any])


class Walk(msgspec.Struct, frozen=True):
    """An order to run one graph walk with these tensors (`inputs`) and plain values (`args`)."""

    name: str
    inputs: Mapping[str, Handle] = {}
    args: Mapping[str, Any] = {}

    def call(self) -> WalkCall:
        """The order as it stands in an event: `args` become what the wire will make of them."""
        args = _DECODER.decode(_ENCODER.encode(dict(self.args)))
        return WalkCall(name=self.name, inputs=dict(self.inputs), args=args)


@dataclass(frozen=True, slots=True)
class Chain:
    """Walks run one after the other without asking the conductor in between."""

    walks: tuple[Walk, ...]

    def __init__(self, *walks: Walk) -> None:
        if not walks:
            raise ValueError("a Chain needs at least one Walk")
        object.__setattr__(self, "walks", walks)


Step: TypeAlias = Walk | Chain


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


Plan: TypeAlias = Generator[Step, StepResult, Finish]


class Planner(Protocol):
    """The part of a model's graph the conductor needs to plan with."""

    def plan(self, request: PlanRequest) -> Plan:
        """A new run of the plan for `request`."""
        ...


class Journey:
    """One request's plan, run as far as its results reach.

    `advance` feeds what is new; after a restart it feeds everything again. Errors raised by the plan
    pass through.
    """

    def __init__(self, planner: Planner, request: PlanRequest) -> None:
        self._planner = planner
        self._request = request
        self._plan: Plan | None = None
        self._fed = 0

    def advance(self, results: Sequence[StepResult]) -> Step | Finish:
        """The step that follows `results`, or the plan's return."""
        if self._plan is None or len(results) != self._fed + 1:
            self._plan, self._fed = self._planner.plan(self._request), 0
            step = self._take(None)
            if not results:
                return step
        for result in results[self._fed :]:
            self._fed += 1
            step = self._take(result)
            if isinstance(step, Finish) and self._fed < len(results):
                raise BugError("the plan returned although more results are recorded")
        return step

    def _take(self, result: StepResult | None) -> Step | Finish:
        assert self._plan is not None
        try:
            return next(self._plan) if result is None else self._plan.send(result)
        except StopIteration as stop:
            if not isinstance(stop.value, Finish):
                raise BugError(f"a plan must return a Finish, not {stop.value!r}") from stop
            return stop.value
