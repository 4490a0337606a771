"""One request's output: the chunks of its writers, in order, each once. Pure.

Every reader of an output folds the request's records through a `RequestOutput`, in log order: the gateway,
the Python client over NATS, a worker that continues after the output of an earlier attempt, the replay. Its
rules, which `docs/nats.md` states for readers in other languages:

- The latest `request.admitted`, `request.resumed` or fence names the output's writers: the ranks that the
  request is placed on, each with its incarnation. A chunk by anyone else is void. A fence of a request that
  is held names nobody: the request is resumed later.
- Nothing before the admission and nothing after the end is part of the output.
- Fences, duplicates and order: see `shared.transcript`.

A chunk's writer is the last token of its subject, which the NATS server enforces, and not the field `writer`.
The reader drops events that do not belong on their subject (`shared.subject_rules`) and those of deposed
conductors (`shared.epoch_fence`) before it folds them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

from shared.events import (
    AnyEvent,
    OutputChunk,
    OutputFence,
    RequestAdmitted,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestResumed,
)
from shared.subjects import Address, worker_writer
from shared.transcript import Transcript

_MAX_OBJECTIONS: Final = 64
"""Different objections that are counted; a forger could invent any number of incarnations."""

_Lives: TypeAlias = Mapping[str, int | None]


class Objection(NamedTuple):
    """The reason why chunks of a writer are void."""

    writer: str
    reason: str

    def __str__(self) -> str:
        return f"{self.writer}: {self.reason}"


@dataclass(slots=True)
class RequestOutput:
    """The fold.

    Attributes:
        transcript: the valid chunks' totals, by track.
        has_ended: the request's end was folded.
        objections: the number of chunks of unauthorised writers, by objection. Late chunks of earlier
            attempts, and those after the end, are normal and not counted.
    """

    transcript: Transcript = field(default_factory=Transcript)
    has_ended: bool = False
    objections: dict[Objection, int] = field(default_factory=dict)
    _lives: _Lives | None = None
    _has_lives: bool = False
    _placed_by: set[str] = field(default_factory=set)

    def fold(self, address: Address, event: AnyEvent) -> list[OutputChunk]:
        """Fold one record of the request; return the chunks that became valid, in order."""
        match event:
            case OutputChunk():
                return self._chunk(str(address.writer), event)
            case OutputFence():
                self._fence(event)
            case RequestAdmitted() | RequestResumed():
                self._place(event)
            case RequestFinished() | RequestFailed() | RequestCancelled():
                self.has_ended = True
            case _:
                pass
        return []

    def advises(self, address: Address, chunk: OutputChunk) -> bool:
        """Tell whether this is an advisory chunk that a client may see; it is no part of the output."""
        is_present = chunk.attempt >= self.transcript.attempt and not self.has_ended
        return chunk.advisory and is_present and self.may_write(str(address.writer), chunk.incarnation)

    def may_write(self, writer: str, incarnation: int | None) -> bool:
        """Tell whether the request is placed on this incarnation of a writer (`w<rank>`) now."""
        if self._lives is None or writer not in self._lives:
            return False
        life = self._lives[writer]
        return life is None or life == incarnation

    def is_placed_on(self, writer: str) -> bool:
        """Tell whether the request is placed on any incarnation of a writer now."""
        return self._lives is not None and writer in self._lives

    def _chunk(self, writer: str, chunk: OutputChunk) -> list[OutputChunk]:
        if self.has_ended or chunk.attempt < self.transcript.attempt:
            return []
        if self.may_write(writer, chunk.incarnation):
            return self.transcript.fold(chunk)
        self._object(Objection(writer, self._reason(writer, chunk)))
        return []

    def _reason(self, writer: str, chunk: OutputChunk) -> str:
        if self._lives is None:
            return "the request is not admitted"
        if not self._lives:
            return "the request is held: nobody has an order"
        if writer not in self._lives:
            return f"a writer without an order; the request is placed on {', '.join(sorted(self._lives))}"
        return f"written by incarnation {chunk.incarnation}; incarnation {self._lives[writer]} has the order"

    def _object(self, objection: Objection) -> None:
        if objection in self.objections or len(self.objections) < _MAX_OBJECTIONS:
            self.objections[objection] = self.objections.get(objection, 0) + 1

    def _place(self, event: RequestAdmitted | RequestResumed) -> None:
        if event.id in self._placed_by:
            return  # a second copy, perhaps of an earlier placement
        self._placed_by.add(event.id)
        self._lives = writers_of(event)
        self._has_lives = bool(event.lives)
        if self._has_lives and isinstance(event, RequestResumed):
            self.transcript.begin(event.attempt)  # its fence may be stored later

    def _fence(self, event: OutputFence) -> None:
        if event.attempt > self.transcript.attempt and self._has_lives:
            self._lives = event.lives
        self.transcript.begin(event.attempt)


def writers_of(event: RequestAdmitted | RequestResumed) -> Mapping[str, int | None]:
    """The writers of a placement (`w<rank>`), each with its incarnation.

    Older versions wrote no `lives`; then any incarnation is accepted.
    """
    if event.lives:
        return event.lives
    elsewhere = (rank for nodes in event.walk_placement.values() for rank in nodes.values())
    return {worker_writer(rank): None for rank in (*event.placement.values(), *elsewhere)}
