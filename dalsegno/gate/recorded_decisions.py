"""The recorded decisions of `schedule`, and when each was made. Pure.

The log says when a decision was stored; the conductor made it some records earlier. The conductor numbers its
events, and a decision of `react` follows from one known record, its *cause*. So a decision of `schedule` that
is numbered between two of these was made after the first one's cause and before the second one's:

    number        5 node.ready       6 request.admitted       7 node.ready
    cause         record 40          ?  in [40, 51]           record 52

These bounds are the *window* of a decision. Within an epoch all events of its conductor have consecutive
numbers; a number that is missing is an event that the log never got.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from conductor.core.cluster import Cluster, Entry
from conductor.core.request import Decision
from models.base import ModelGraph
from shared.events import (
    AnyEvent,
    EpochOpened,
    MalformedEventError,
    RequestAdmitted,
    RequestRejected,
    RequestResumed,
    RequestSubmitted,
)
from shared.log.port import StoredRecord
from shared.subject_rules import read_event
from shared.subjects import CONDUCTOR_WRITER, Subjects

Scheduled: TypeAlias = RequestAdmitted | RequestResumed | RequestRejected
"""Decisions that depend on all requests. A refusal of a submission is among them."""

_OUTPUT_TOKENS: Final = 5


@dataclass(slots=True, kw_only=True)
class Made:
    """A recorded decision of `schedule`.

    Attributes:
        seq: its position.
        earliest, latest: its window, as positions of the record after which it was made.
    """

    event: Scheduled
    epoch: int
    seq: int
    number: int
    earliest: int = 0
    latest: int = 0


@dataclass(slots=True, kw_only=True)
class Epoch:
    """One conductor's leadership, as recorded.

    Attributes:
        seq: the position of its `epoch.opened`.
        has_led_before: True if the same process led an earlier epoch.
        configs: the digests of the configurations that its admissions name.
        numbers: the numbers of all its conductor's events in the log, ascending.
        made: its decisions of `schedule` by id.
        causes, caused: by decision of `react`, in the order of their numbers: the position of its cause, and
            its number.
    """

    epoch: int
    conductor: str
    seq: int
    has_led_before: bool = False
    configs: list[str] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    made: dict[str, Made] = field(default_factory=dict)
    causes: list[int] = field(default_factory=list)
    caused: list[int] = field(default_factory=list)

    def has_decided_after(self, seq: int) -> bool:
        """True if the log proves that its conductor went on after it had decided what follows from `seq`."""
        return bool(self.causes) and self.causes[-1] > seq

    def has_lost_events(self, seq: int) -> bool:
        """True if an event that its conductor wrote after the record at `seq` is not in the log."""
        place = bisect_right(self.causes, seq)
        before = self.caused[place - 1] if place else None
        after = self.caused[place] if place < len(self.caused) else None
        if after is None:
            return True
        if before is None:
            if self.has_led_before:  # its count goes on, from where is not known
                return True
            before = 0
        between = bisect_left(self.numbers, after) - bisect_right(self.numbers, before)
        return between < after - before - 1


@dataclass(slots=True)
class RecordedDecisions:
    """All epochs of a log, by number, and the records that have no readable event."""

    epochs: dict[int, Epoch] = field(default_factory=dict)
    unreadable: list[StoredRecord] = field(default_factory=list)


def for_conductor(subject: str, subjects: Subjects) -> bool:
    """Tell whether a conductor reads records on a subject (`Subjects.for_conductor`)."""
    prefix, _, rest = subject.partition(".")
    kind = rest.partition(".")[0]
    if prefix != subjects.prefix:
        return False
    if kind == "output":
        return subject.count(".") == _OUTPUT_TOKENS - 1 and subject.endswith(f".{CONDUCTOR_WRITER}")
    if kind == "conductor":
        return subject in subjects.conductor_facts()
    return kind in {"request", "control", "walk", "ready", "done", "worker", "adapter"}


class Fold:
    """A fold of a whole log as a conductor makes it, which finds requests that it has forgotten again.

    Attributes:
        is_readable: whether the last record has an event that this version knows.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.is_readable = True
        self._submissions: dict[str, list[StoredRecord]] = {}

    def read(self, record: StoredRecord) -> tuple[AnyEvent | None, tuple[Decision, ...], bool]:
        """Fold a record; return its event if it is valid, what follows, and whether it opens an epoch."""
        cluster = self.cluster
        if (request_id := cluster.may_have_forgotten(record)) is not None:
            for earlier in self._submissions.get(record.subject, ()):
                if cluster.recall(request_id, earlier):
                    break
        self._note(record)
        entry = cluster.read(record)
        self.is_readable = isinstance(entry, Entry)
        if not isinstance(entry, Entry):
            return None, entry.decisions, False
        folded = cluster.apply(entry)
        if folded.void:
            return None, (), False
        return entry.event, folded.decisions, isinstance(entry.event, EpochOpened)

    def _note(self, record: StoredRecord) -> None:
        if not record.subject.startswith(self.cluster.subjects.request("")):
            return
        try:
            _, event = read_event(record, self.cluster.subjects)
        except MalformedEventError:
            return
        if isinstance(event, RequestSubmitted):
            self._submissions.setdefault(record.subject, []).append(record)


def index(
    records: Iterable[StoredRecord], subjects: Subjects, graph_of: Callable[[str], ModelGraph]
) -> RecordedDecisions:
    """Find the decisions of a log, which `records` (those that a conductor reads) has from its beginning."""
    found = RecordedDecisions()
    fold = Fold(Cluster(graph_of, subjects))
    cluster = fold.cluster
    causes: dict[tuple[int, str], int] = {}
    numbered: dict[int, list[tuple[int, str]]] = {}
    known: set[str] = set()
    for record in records:
        event, decisions, opens = fold.read(record)
        if not fold.is_readable:
            found.unreadable.append(record)
        epoch = cluster.fence.epoch
        if isinstance(event, EpochOpened) and opens:
            led_before = any(one.conductor == event.conductor for one in found.epochs.values())
            found.epochs[epoch] = Epoch(
                epoch=epoch, conductor=event.conductor, seq=record.seq, has_led_before=led_before
            )
            decisions = tuple(cluster.outstanding())
        for decision in decisions:
            causes.setdefault((epoch, decision.id), record.seq)
        if epoch not in found.epochs or event is None or event.writer != CONDUCTOR_WRITER:
            continue
        if event.number:
            numbered.setdefault(epoch, []).append((event.number, event.id))
        if isinstance(event, Scheduled) and event.id not in known:
            known.add(event.id)
            _take(found.epochs[epoch], event, record.seq)
    for number, one in found.epochs.items():
        _close(one, sorted(set(numbered.get(number, []))), causes)
    return found


def _take(epoch: Epoch, event: Scheduled, seq: int) -> None:
    epoch.made[event.id] = Made(event=event, epoch=epoch.epoch, seq=seq, number=event.number)
    if isinstance(event, RequestAdmitted) and event.pins.config not in epoch.configs:
        epoch.configs.append(event.pins.config)


def _close(epoch: Epoch, numbered: Sequence[tuple[int, str]], causes: dict[tuple[int, str], int]) -> None:
    """Find the windows of an epoch's decisions from the numbers of all its events."""
    epoch.numbers = sorted({number for number, _ in numbered})
    for number, event_id in numbered:
        cause = causes.get((epoch.epoch, event_id))
        # A cause before the last one is that of a decision which is made at another time now.
        if cause is not None and event_id not in epoch.made and cause >= (epoch.causes or [0])[-1]:
            epoch.causes.append(cause)
            epoch.caused.append(number)
    for one in epoch.made.values():
        place = bisect_left(epoch.caused, one.number) if one.number else 0
        one.earliest = epoch.causes[place - 1] if place else epoch.seq
        following = epoch.causes[place] if one.number and place < len(epoch.causes) else one.seq
        one.latest = min(one.seq, following) - 1
        if one.earliest > one.latest:
            one.earliest, one.latest = epoch.seq, one.seq - 1
