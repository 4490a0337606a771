"""Plans: generators that decide which walk a request runs next.

The conductor runs a plan (`shared.plan_run`). Each `yield` gives a `Walk` or a `Chain`, and receives its
`StepResult`: facts and opaque handles, never tensor values. A plan returns a `Finish`, or raises a
`ClientError`, which fails the request with a typed error. A plan depends only on its request and on the
results: it uses no clock, no randomness and no I/O.

Parts of a model that run concurrently are sub-plans, which are generators as well. `Start` starts one and
returns at once. `Join` waits for it and returns its return value. Each sub-plan is a *partition* of the plan
run, with one pending step at a time. Their results count in the order of the log:

    yield Start("talker", talk(request))        its first step is pending from here on
    text = yield Walk("listen")                 concurrently
    speech = yield Join("talker")               waits, unless the sub-plan has returned
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias, TypeVar

import msgspec

from shared.errors import BugError, ClientError
from shared.events import Inputs, Limits, OutputTotals, Params, Usage, WalkCall, WalkResult
from shared.tensors import Handle

_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final[msgspec.msgpack.Decoder[dict[str, Any]]] = msgspec.msgpack.Decoder(dict[str, Any])
_Facts = TypeVar("_Facts", bound=msgspec.Struct)
_Options = TypeVar("_Options", bound=msgspec.Struct)


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
    """Walks that run one after the other without a decision of the conductor in between.

    `ends` names streams that end with this step, including those of its walks.
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
    """Start the new sub-plan `plan` under a unique name. The plan has to `Join` it before it returns."""

    name: str
    plan: "SubPlan"


@dataclass(frozen=True, slots=True)
class Join:
    """Wait for a sub-plan that this plan started, and receive its return value."""

    name: str


class StepResult(msgspec.Struct, frozen=True):
    """The result of one step: the results of its walks, and the totals of the output so far."""

    walks: tuple[WalkResult, ...]
    output: OutputTotals = OutputTotals()

    def fact(self, name: str) -> Any:
        """Return the fact `name` of the last walk that reported it."""
        for walk in reversed(self.walks):
            if name in walk.facts:
                return walk.facts[name]
        known = sorted({fact for walk in self.walks for fact in walk.facts})
        raise BugError(f"no walk of this step reported the fact {name!r}; reported were {known}")

    def facts_as(self, kind: type[_Facts]) -> _Facts:
        """Return all facts of the step as one struct; the last walk that reported a fact counts.

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
        """Return the handle of the output `name` of the last walk that has it."""
        for walk in reversed(self.walks):
            if name in walk.outputs:
                return walk.outputs[name]
        known = sorted({out for walk in self.walks for out in walk.outputs})
        raise BugError(f"no walk of this step has the output {name!r}; the outputs are {known}")


class Finish(msgspec.Struct, frozen=True, kw_only=True):
    """The plan's return value: the request's usage, and the finish reason of each choice.

    Attributes:
        stop_reasons: of each choice, the stop string, or the id of the token, that ended it; None for
            neither. Empty where no choice was ended so.
    """

    usage: Usage
    finish_reasons: tuple[str, ...]
    stop_reasons: tuple[str | int | None, ...] = ()


class PlanRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The data of a request that its plan may depend on."""

    request_id: str
    inputs: Inputs
    params: Params
    limits: Limits
    seed: int

    def options_as(self, kind: type[_Options]) -> _Options:
        """Return the options of the request as the family's type.

        Raises:
            ClientError: an option is unknown or has a wrong value. Gateway and conductor refuse it earlier.
        """
        try:
            return msgspec.convert(self.params.options, kind)
        except msgspec.ValidationError as error:
            raise ClientError(f"options: {error}", code="invalid_value") from error


SubPlan: TypeAlias = Generator[Step | Start | Join, Any, Any]
"""A concurrent part of a plan. A yielded step receives its `StepResult`; `Join` receives the return value."""
Plan: TypeAlias = Generator[Step | Start | Join, Any, Finish]


class Planner(Protocol):
    """The part of a model's graph that the conductor needs."""

    def plan(self, request: PlanRequest) -> Plan:
        """Return a new generator of the plan for `request`."""
        ...
