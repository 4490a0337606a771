"""The simulated log, with its own misbehaviour.

Records come in one order and stay: unless the log loses its tail, or is made anew. It may be down, full or
slow, its clock may go backwards, and what is sent to it may be lost on the way, or its ack on the way back:
then the sender sends it again, behind later events, and it is stored twice.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from shared.epoch_fence import EpochFence
from shared.events import AnyEvent, EpochOpened, MalformedEventError, decode
from shared.log.port import StoredRecord
from shared.subjects import Address
from tests.conductor.script import SUBJECTS

NOWHERE: Final = Address(kind="")
"""Of a record on a subject that is none of ours."""


@dataclass(slots=True)
class SimLog:
    """Everybody's log.

    Attributes:
        addresses, events: what the records' subjects and bytes say; None where they say nothing.
        written: in which generation of the log each record was stored.
        lost: the records that are gone, with that.
        past: by generation, how much of the log was left when the next one began, and whether that is
            another log: `(records kept, is new)`.
        skew_ns: how far its clock is from the world's.
    """

    clock: Callable[[], int]
    records: list[StoredRecord] = field(default_factory=list)
    addresses: list[Address] = field(default_factory=list)
    events: list[AnyEvent | None] = field(default_factory=list)
    written: list[int] = field(default_factory=list)
    lost: list[tuple[int, StoredRecord]] = field(default_factory=list)
    by_subject: defaultdict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    past: list[tuple[int, bool]] = field(default_factory=list)
    is_up: bool = True
    is_full: bool = False
    is_slow: bool = False
    skew_ns: int = 0

    @property
    def generation(self) -> int:
        """How often it went back."""
        return len(self.past)

    @property
    def made(self) -> int:
        """Which of the logs that were made anew it is: what `created_ns` tells of a real one."""
        return sum(is_new for _, is_new in self.past)

    @property
    def last_seq(self) -> int:
        return len(self.records)

    def append(self, subject: str, data: bytes) -> int:
        """Store an event, as any publisher may; its sequence."""
        seq = len(self.records) + 1
        address = SUBJECTS.parse(subject) or NOWHERE
        try:
            event = decode(data, address.kind)
        except MalformedEventError:
            event = None
        self.records.append(StoredRecord(seq, subject, data, self.clock() + self.skew_ns))
        self.addresses.append(address)
        self.events.append(event)
        self.written.append(self.generation)
        self.by_subject[subject].append(seq)
        return seq

    def go_back(self, keep: int, *, is_new: bool) -> None:
        """Lose all but the first records."""
        self.lost += zip(self.written[keep:], self.records[keep:], strict=True)
        for kept in (self.records, self.addresses, self.events, self.written):
            del kept[keep:]
        self.by_subject.clear()
        for record in self.records:
            self.by_subject[record.subject].append(record.seq)
        self.past.append((keep, is_new))

    def goes_back_on(self, highest: int, generation: int) -> bool:
        """Whether a process that knew the log up to `highest`, in that generation, knows what is gone."""
        return any(is_new or keep < highest for keep, is_new in self.past[generation:])

    # ---- reading what is there ---------------------------------------------------------------------
    def last(self, subject: str) -> int:
        """The sequence of the newest record on a subject; 0 where there is none."""
        return self.by_subject[subject][-1] if subject in self.by_subject else 0

    def opened(self, end: int | None = None) -> EpochFence:
        """The fence behind the first `end` records."""
        fence = EpochFence()
        for event in self.events[:end]:
            if isinstance(event, EpochOpened):
                fence.admits(event)
        return fence

    def valid(self) -> list[tuple[int, AnyEvent]]:
        """The events that count, with their sequences."""
        fence = EpochFence()
        return [
            (seq, event)
            for seq, event in enumerate(self.events, 1)
            if event is not None and fence.admits(event)
        ]
