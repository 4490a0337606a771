"""What a walk is written in.

A walk is made of `Node`s that send named values along `Edge`s. `Sequential` and `Parallel` order
nothing: a node fires as soon as all its inputs are there. They only say what an edge between their
sections means. In a `Sequential`, an edge to an earlier section (or from a node to itself) goes *back*,
to the next iteration of the loop around it; in a `Parallel`, an edge to a sibling stays in the
iteration. A `Loop` repeats its body, and is the only thing that does.

What is wrong with a single part is found here, when it is written; what is wrong between parts is found
by `shared.walks.compiler`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from shared.ids import is_token


class WalkError(ValueError):
    """A walk that cannot be built, or run, as asked; says where, and what would be right."""


@dataclass(frozen=True, slots=True)
class Client:
    """The destination of what a client reads, as one of the modalities: `CLIENT("text")`."""

    modality: str

    def __post_init__(self) -> None:
        check_name("a modality", self.modality)

    def __str__(self) -> str:
        return f'CLIENT("{self.modality}")'


@dataclass(frozen=True, slots=True)
class Keep:
    """The destination of what a walk comes to: its handle goes into the walk's result."""

    def __str__(self) -> str:
        return "KEEP"


CLIENT: Final = Client
KEEP: Final = Keep()
Destination: TypeAlias = str | Client | Keep
"""A node's name, `CLIENT(modality)`, or `KEEP`."""


@dataclass(frozen=True, slots=True)
class Edge:
    """A named value, on its way from the node that lists the edge to a destination."""

    name: str
    to: Destination

    def __post_init__(self) -> None:
        check_name("an edge", self.name)
        _check_type(f"edge {self.name!r}: to", self.to, Destination, 'a node\'s name, CLIENT("text") or KEEP')


@dataclass(frozen=True, slots=True)
class Node:
    """A component of the model: fires when all `inputs` are there, and then produces all `outputs`."""

    name: str
    inputs: Sequence[str] = ()
    outputs: Sequence[Edge] = ()

    def __post_init__(self) -> None:
        check_name("a node", self.name)
        object.__setattr__(self, "inputs", _names(f"node {self.name!r}: inputs", self.inputs))
        object.__setattr__(self, "outputs", tuple(self.outputs))
        for edge in self.outputs:
            _check_type(f"node {self.name!r}: an output", edge, Edge, "an Edge")
        if len(set(self.outputs)) < len(self.outputs):
            raise WalkError(
                f"node {self.name!r}: outputs list an edge twice; list each name and destination once"
            )


@dataclass(frozen=True, slots=True, init=False)
class Sequential:
    """Sections in a row; an edge to an earlier one goes back, to the next iteration."""

    sections: tuple["Section", ...]

    def __init__(self, *sections: "Section") -> None:
        object.__setattr__(self, "sections", _sections("a Sequential", sections))


@dataclass(frozen=True, slots=True, init=False)
class Parallel:
    """Sections side by side; an edge to a sibling stays in the iteration."""

    sections: tuple["Section", ...]

    def __init__(self, *sections: "Section") -> None:
        object.__setattr__(self, "sections", _sections("a Parallel", sections))


@dataclass(frozen=True, slots=True)
class Loop:
    """A body run up to `max_iters` times: a number, or the name of an argument of the walk.

    An edge out of the loop is held until the loop ends: those named in `outputs` then carry the value
    of the last iteration, those in `accumulated` the list of all. An edge to `CLIENT` that no loop
    names is not held: it emits in every iteration.
    """

    name: str
    body: "Section"
    max_iters: int | str
    outputs: Sequence[str] = ()
    accumulated: Sequence[str] = ()

    def __post_init__(self) -> None:
        check_name("a loop", self.name)
        _sections(f"loop {self.name!r}: the body", (self.body,))
        if isinstance(self.max_iters, str):
            check_name(f"loop {self.name!r}: the argument for max_iters", self.max_iters)
        else:
            check_max_iters(self.name, self.max_iters)
        object.__setattr__(self, "outputs", _names(f"loop {self.name!r}: outputs", self.outputs))
        object.__setattr__(self, "accumulated", _names(f"loop {self.name!r}: accumulated", self.accumulated))
        if both := sorted({*self.outputs} & {*self.accumulated}):
            raise WalkError(f"loop {self.name!r}: outputs and accumulated must be disjoint; both list {both}")


Section: TypeAlias = Node | Sequential | Parallel | Loop


def describe(section: Section) -> list[Any]:
    """The section as plain data: equal for equal sections, in every process."""
    match section:
        case Node():
            edges = [[edge.name, *_destination(edge.to)] for edge in section.outputs]
            return ["node", section.name, list(section.inputs), edges]
        case Loop():
            leaving = [list(section.outputs), list(section.accumulated)]
            return ["loop", section.name, section.max_iters, *leaving, describe(section.body)]
        case Sequential():
            return ["sequential", *map(describe, section.sections)]
        case Parallel():
            return ["parallel", *map(describe, section.sections)]


def _destination(to: Destination) -> list[str]:
    match to:
        case str():
            return ["node", to]
        case Client():
            return ["client", to.modality]
        case Keep():
            return ["keep"]


def check_max_iters(loop: str, value: object) -> int:
    """`value`, which must be a number of iterations."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise WalkError(f"loop {loop!r}: max_iters must be an integer of at least 1, not {value!r}")
    return value


def check_name(what: str, name: object) -> None:
    """`name` must be fit for a tensor's key and a subject."""
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


def _sections(what: str, sections: tuple["Section", ...]) -> tuple["Section", ...]:
    if not sections:
        raise WalkError(f"{what} is empty; it needs at least one section")
    for section in sections:
        _check_type(f"{what}: a section", section, Section, "a Node, Sequential, Parallel or Loop")
    return sections
