"""The language of walks: the elements from which a walk is written.

A walk consists of `Node`s that send named values along `Edge`s. A node fires as soon as all its inputs exist;
`Sequential` and `Parallel` do not order anything. They only determine the meaning of an edge between their
sections. In a `Sequential`, an edge to an earlier section (or from a node to itself) goes *back*, to the next
iteration of the enclosing loop. In a `Parallel`, an edge to a sibling stays within the iteration. Only a
`Loop` repeats its body.

Between two walks that run concurrently, a `StreamingEdge` carries items one by one. The node that lists the
`StreamInput` takes them in chunks (`shared.walks.chunks`), one per firing.

Errors in a single element are raised here, when it is constructed; errors between elements are raised by
`shared.walks.compiler`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, get_args

from shared.ids import is_token
from shared.walks.chunks import AFTER_END, AfterEnd, ChunkPolicy
from shared.walks.errors import WalkError


@dataclass(frozen=True, slots=True)
class ToClient:
    """The destination of output for the client, in one modality: `CLIENT("text")`."""

    modality: str

    def __post_init__(self) -> None:
        check_name("a modality", self.modality)

    def __str__(self) -> str:
        return f'CLIENT("{self.modality}")'


@dataclass(frozen=True, slots=True)
class Keep:
    """The destination of a walk's result: the value's handle goes into the walk's result."""

    def __str__(self) -> str:
        return "KEEP"


CLIENT: Final = ToClient
KEEP: Final = Keep()
Destination: TypeAlias = str | ToClient | Keep
"""A node's name, `CLIENT(modality)`, or `KEEP`."""

Guard: TypeAlias = Callable[[int, Mapping[str, Any]], bool]
"""The condition under which an edge sends, given the iteration (of the innermost loop around its node) and
the walk's arguments. It is a module-level function that depends only on these two, because every rank calls
it."""


OnResume: TypeAlias = Literal["reproduce", "keep"]
"""The meaning of output that an earlier attempt has released, for the attempt that computes it again."""
REPRODUCE: Final = "reproduce"
KEEP_RELEASED: Final = "keep"


@dataclass(frozen=True, slots=True)
class Edge:
    """A named value from the node that lists the edge to a destination.

    In an iteration in which `when` returns false, the edge sends nothing.

    Attributes:
        on_resume: for an edge to the client: `"reproduce"`: a later attempt must compute the same bytes as
            an earlier one has released. `"keep"`: what was released is the value, and the walk continues
            with it; for floating-point results, whose last bits depend on the batch (ADR 34).
    """

    name: str
    to: Destination
    when: Guard | None = None
    on_resume: OnResume = REPRODUCE

    def __post_init__(self) -> None:
        check_name("an edge", self.name)
        _check_type(f"edge {self.name!r}: to", self.to, Destination, 'a node\'s name, CLIENT("text") or KEEP')
        if self.when is not None:
            guard_name(f"edge {self.name!r}", self.when)
        if self.on_resume not in get_args(OnResume):
            raise WalkError(
                f'edge {self.name!r}: on_resume must be "reproduce" or "keep", not {self.on_resume!r}'
            )
        if self.on_resume != REPRODUCE and not isinstance(self.to, ToClient):
            raise WalkError(
                f"edge {self.name!r} goes to {self.to!r}; on_resume belongs to edges to CLIENT only, because "
                "nothing else is released"
            )


@dataclass(frozen=True, slots=True)
class StreamInput:
    """An input that another walk feeds through a `StreamingEdge`. Each firing takes its next chunk."""

    name: str

    def __post_init__(self) -> None:
        check_name("a stream", self.name)


@dataclass(frozen=True, slots=True)
class StreamingEdge:
    """Items for a node of another walk, which runs concurrently and lists the `StreamInput`.

    Several walks may feed one stream, one after the other, with equal edges.

    Attributes:
        chunks: the division of the items into chunks.
        after_end: the behaviour after the final chunk: `"stop"` ends the loop around the node with the firing
            that takes the final chunk; `"empty"` gives each later firing an empty chunk.
        only: send only items with `low <= item < high`, for numeric items.
    """

    name: str
    to: str
    chunks: ChunkPolicy
    after_end: AfterEnd = "stop"
    only: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        check_name("a streaming edge", self.name)
        what = f"streaming edge {self.name!r}"
        check_name(f"{what}: the node it goes to", self.to)
        _check_type(f"{what}: chunks", self.chunks, ChunkPolicy, "a Fixed, SlidingWindow or LeftContext")
        if self.after_end not in AFTER_END:
            raise WalkError(f'{what}: after_end must be "stop" or "empty", not {self.after_end!r}')
        if self.only is not None:
            object.__setattr__(self, "only", _bounds(what, self.only))

    def accepts(self, item: int) -> bool:
        """Return whether the edge sends the item."""
        return self.only is None or self.only[0] <= item < self.only[1]


@dataclass(frozen=True, slots=True)
class Node:
    """A component of the model. It fires when all `inputs` exist, and then produces all `outputs`.

    If a guard keeps an edge from sending, the input at its end is missing. A node with a missing input is
    skipped: it counts as fired and produces nothing. If the missing input is `optional`, the node fires
    without it.
    """

    name: str
    inputs: Sequence[str | StreamInput] = ()
    outputs: Sequence[Edge | StreamingEdge] = ()
    optional: Sequence[str] = ()

    def __post_init__(self) -> None:
        check_name("a node", self.name)
        what = f"node {self.name!r}"
        object.__setattr__(self, "inputs", _inputs(f"{what}: inputs", self.inputs))
        object.__setattr__(self, "outputs", tuple(self.outputs))
        object.__setattr__(self, "optional", _names(f"{what}: optional", self.optional))
        for edge in self.outputs:
            _check_type(f"{what}: an output", edge, Edge | StreamingEdge, "an Edge or a StreamingEdge")
        if len({(edge.name, edge.to) for edge in self.outputs}) < len(self.outputs):
            raise WalkError(f"{what}: outputs list an edge twice; list each name and destination once")
        if strange := sorted({*self.optional} - {*self.values}):
            raise WalkError(
                f"{what}: optional lists {strange}, but only inputs that an Edge feeds can be optional; the "
                f"node has {sorted(self.values)}"
            )

    @property
    def values(self) -> tuple[str, ...]:
        """The inputs that are values, one per firing."""
        return tuple(entry for entry in self.inputs if isinstance(entry, str))

    @property
    def streams(self) -> tuple[str, ...]:
        """The inputs that are streams."""
        return tuple(entry.name for entry in self.inputs if isinstance(entry, StreamInput))

    @property
    def edges(self) -> tuple[Edge, ...]:
        """The outputs within the walk, to the client, or into the walk's result."""
        return tuple(edge for edge in self.outputs if isinstance(edge, Edge))

    @property
    def streaming(self) -> tuple[StreamingEdge, ...]:
        """The outputs that are streams into other walks."""
        return tuple(edge for edge in self.outputs if isinstance(edge, StreamingEdge))


@dataclass(frozen=True, slots=True, init=False)
class Sequential:
    """Sections in sequence; an edge to an earlier one goes back, to the next iteration."""

    sections: tuple["Section", ...]

    def __init__(self, *sections: "Section") -> None:
        object.__setattr__(self, "sections", _sections("a Sequential", sections))


@dataclass(frozen=True, slots=True, init=False)
class Parallel:
    """Sections in parallel; an edge to a sibling stays within the iteration."""

    sections: tuple["Section", ...]

    def __init__(self, *sections: "Section") -> None:
        object.__setattr__(self, "sections", _sections("a Parallel", sections))


@dataclass(frozen=True, slots=True)
class Loop:
    """A body that runs up to `max_iters` times: a number, or the name of an argument of the walk.

    With None it runs until it is stopped, by the end of a stream that a node inside consumes, or by such a
    node.

    An edge out of the loop is held until the loop ends. An edge in `outputs` then carries the value of the
    last iteration, an edge in `accumulated` the list of all values. An edge to `CLIENT` that is in neither
    is not held, and emits in every iteration.

    Attributes:
        checkpoint: every so many iterations, what the next one is fed is stored in the log, and a later
            attempt begins the loop with it (`shared.walks.checkpoints`); 0 for never.
    """

    name: str
    body: "Section"
    max_iters: int | str | None
    outputs: Sequence[str] = ()
    accumulated: Sequence[str] = ()
    checkpoint: int = 0

    def __post_init__(self) -> None:
        check_name("a loop", self.name)
        _sections(f"loop {self.name!r}: the body", (self.body,))
        if isinstance(self.max_iters, str):
            check_name(f"loop {self.name!r}: the argument for max_iters", self.max_iters)
        elif self.max_iters is not None:
            check_max_iters(self.name, self.max_iters)
        object.__setattr__(self, "outputs", _names(f"loop {self.name!r}: outputs", self.outputs))
        object.__setattr__(self, "accumulated", _names(f"loop {self.name!r}: accumulated", self.accumulated))
        if both := sorted({*self.outputs} & {*self.accumulated}):
            raise WalkError(f"loop {self.name!r}: outputs and accumulated must be disjoint; both list {both}")
        _check_checkpoint(self.name, self.checkpoint)


Section: TypeAlias = Node | Sequential | Parallel | Loop


def describe(section: Section) -> list[Any]:
    """Return the section as plain data, equal for equal sections in every process."""
    match section:
        case Node():
            inputs = [["stream", it.name] if isinstance(it, StreamInput) else it for it in section.inputs]
            described = ["node", section.name, inputs, [_describe_edge(edge) for edge in section.outputs]]
            return [*described, ["optional", *section.optional]] if section.optional else described
        case Loop():
            leaving = [list(section.outputs), list(section.accumulated)]
            every = [["checkpoint", section.checkpoint]] if section.checkpoint else []
            return ["loop", section.name, section.max_iters, *leaving, describe(section.body), *every]
        case Sequential():
            return ["sequential", *map(describe, section.sections)]
        case Parallel():
            return ["parallel", *map(describe, section.sections)]


def _describe_edge(edge: Edge | StreamingEdge) -> list[Any]:
    if isinstance(edge, StreamingEdge):
        only = None if edge.only is None else list(edge.only)
        return [edge.name, "stream", edge.to, edge.chunks.describe(), edge.after_end, only]
    described = [edge.name, *_destination(edge.to)]
    if edge.when:
        described += ["when", guard_name(f"edge {edge.name!r}", edge.when)]
    return described if edge.on_resume == REPRODUCE else [*described, "on_resume", edge.on_resume]


def _destination(to: Destination) -> list[str]:
    match to:
        case str():
            return ["node", to]
        case ToClient():
            return ["client", to.modality]
        case Keep():
            return ["keep"]


def check_max_iters(loop: str, value: object) -> int:
    """Return `value` if it is a valid number of iterations."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise WalkError(f"loop {loop!r}: max_iters must be an integer of at least 1, not {value!r}")
    return value


def _check_checkpoint(loop: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise WalkError(
            f"loop {loop!r}: checkpoint must be a number of iterations, or 0 for none, not {value!r}"
        )


def guard_name(what: str, guard: object) -> str:
    """Return a guard's name with its module, which represents it in a description of the walk."""
    module, name = getattr(guard, "__module__", None), getattr(guard, "__qualname__", None)
    if not (callable(guard) and isinstance(module, str) and isinstance(name, str)) or "<" in name:
        raise WalkError(
            f"{what}: when must be a module-level function, because its name describes it; found {guard!r}"
        )
    return f"{module}:{name}"


def check_name(what: str, name: object) -> None:
    """Check that `name` can be part of a tensor's key and of a subject."""
    if not isinstance(name, str) or not is_token(name):
        raise WalkError(f"{what} is named {name!r}; expected 1 to 64 letters, digits, '_' or '-'")


def _check_type(what: str, value: object, kind: Any, expected: str) -> None:
    if not isinstance(value, kind):
        raise WalkError(f"{what} must be {expected}, not {value!r}")


def _names(what: str, names: Sequence[str]) -> tuple[str, ...]:
    if isinstance(names, str):
        raise WalkError(f"{what} must be a sequence of names, not {names!r}; write [{names!r}]")
    for name in names:
        check_name(f"{what}: an edge", name)
    if len(set(names)) < len(names):
        raise WalkError(f"{what} list a name twice: {list(names)}")
    return tuple(names)


def _inputs(what: str, inputs: Sequence[str | StreamInput]) -> tuple[str | StreamInput, ...]:
    if isinstance(inputs, str | StreamInput):
        raise WalkError(f"{what} must be a sequence of names, not {inputs!r}; write [{inputs!r}]")
    _names(what, [it.name if isinstance(it, StreamInput) else it for it in inputs])
    return tuple(inputs)


def _bounds(what: str, only: tuple[int, int]) -> tuple[int, int]:
    match only:
        case (int() as low, int() as high) if low < high:
            return low, high
    raise WalkError(f"{what}: only must be two integers (low, high) with low < high, not {only!r}")


def _sections(what: str, sections: tuple["Section", ...]) -> tuple["Section", ...]:
    if not sections:
        raise WalkError(f"{what} is empty; it needs at least one section")
    for section in sections:
        _check_type(f"{what}: a section", section, Section, "a Node, Sequential, Parallel or Loop")
    return sections
