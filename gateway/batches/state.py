"""The state of a batch, as the events on its subject determine it. Pure.

created                    validating     its file is not read yet
checked                    in_progress    its lines run
every segment stored       finalizing     its files are made
cancelled                  cancelling     its running lines are cancelled
ended                      completed, failed, expired or cancelled
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from gateway.batches.results import lines_of_segment
from gateway.requests.usage import UsageTally
from shared.events import (
    AnyEvent,
    BatchCancelled,
    BatchChecked,
    BatchClaimed,
    BatchCreated,
    BatchEnded,
    MalformedEventError,
    SegmentStored,
    Usage,
)
from shared.log.port import StoredRecord
from shared.subject_rules import read_event
from shared.subjects import Subjects

_NS: Final = 1_000_000_000


@dataclass(slots=True)
class BatchState:
    """One batch.

    Attributes:
        created: what the client asked for; None if the log has forgotten it.
        created_seq: the position of that event.
        owner: the gateway that runs it.
        lines: their number, once the file is read.
        segments: the stored segments, by their numbers.
        ended: how it ended.
        times_s: by status, when it was first reached, in seconds since 1970.
        last_seq: the position of the last event.
        event_ids: those of all events.
    """

    id: str
    created: BatchCreated | None = None
    created_seq: int = 0
    owner: str = ""
    lines: int | None = None
    segments: dict[int, SegmentStored] = field(default_factory=dict)
    is_cancelled: bool = False
    ended: BatchEnded | None = None
    times_s: dict[str, int] = field(default_factory=dict)
    last_seq: int = 0
    event_ids: set[str] = field(default_factory=set)

    @property
    def status(self) -> str:
        """The status in OpenAI's words."""
        if self.ended is not None:
            return self.ended.status
        if self.is_cancelled:
            return "cancelling"
        if self.lines is None:
            return "validating"
        return "finalizing" if self.completed + self.failed == self.lines else "in_progress"

    @property
    def completed(self) -> int:
        """The number of lines of stored segments that have an answer."""
        return sum(one.completed for one in self.segments.values())

    @property
    def failed(self) -> int:
        """The number of lines of stored segments that have an error."""
        return sum(one.failed for one in self.segments.values())

    @property
    def models(self) -> set[str]:
        """The names of the models that answered lines of stored segments."""
        return {name for one in self.segments.values() for name in one.models}

    @property
    def usage(self) -> Usage | None:
        """The tokens of the answers of stored segments; None if an older log does not tell."""
        tally = UsageTally(n=1)
        for one in self.segments.values():
            if one.usage is None:
                return None
            tally.add(0, one.usage)
        return tally.usage

    @property
    def has_partial_segment(self) -> bool:
        """True if lines of a stored segment have no result: the file was deleted before they were read."""
        return self.lines is not None and any(
            one.completed + one.failed < lines_of_segment(one.segment, self.lines)
            for one in self.segments.values()
        )

    def fold(self, seq: int, time_ns: int, event: AnyEvent) -> None:
        """Apply an event, in the log's order. A repeated one, and one after the end, changes nothing."""
        self.last_seq = max(self.last_seq, seq)
        if event.id in self.event_ids or self.ended is not None:
            return
        self.event_ids.add(event.id)
        match event:
            case BatchCreated() if self.created is None:
                self.created, self.created_seq, self.owner = event, seq, event.writer
            case BatchClaimed():
                self.owner = event.writer
            case BatchChecked() if self.lines is None:
                self.lines = event.lines
            case SegmentStored():
                self.segments.setdefault(event.segment, event)
            case BatchCancelled():
                self.is_cancelled = True
            case BatchEnded():
                self.ended = event
            case _:
                return
        self.times_s.setdefault(self.status, time_ns // _NS)


def fold_records(states: dict[str, BatchState], record: StoredRecord, subjects: Subjects) -> str | None:
    """Apply a record on a batch's subject to its state; return the batch's id, or None if it is no event."""
    try:
        address, event = read_event(record, subjects)
    except MalformedEventError:
        return None
    batch_id = address.name
    assert batch_id is not None, "the subject of a batch has its id"
    states.setdefault(batch_id, BatchState(batch_id)).fold(record.seq, record.time_ns, event)
    return batch_id


def digests_of(segments: Iterable[SegmentStored], *, is_error: bool) -> list[str]:
    """The parts of the file of answers, or of errors, in the order of the lines."""
    ordered = sorted(segments, key=lambda one: one.segment)
    digests = (one.errors if is_error else one.output for one in ordered)
    return [digest for digest in digests if digest is not None]
