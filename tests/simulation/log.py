"""The simulated log, with its failures.

Records have one order and stay, unless the log loses its tail or is created anew. The log may be down, full
or
slow, and its clock may go backwards. A message to it may be lost, or its ack: the sender then sends the event
again, after later events, and it is stored twice.
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
    """The log that all processes share.

    Attributes:
        addresses, events: the parsed subjects and events of the records; None where they are invalid.
        written: the log's generation in which each record was stored.
        lost: the records that the log has lost.
        past: by generation, `(records kept, is new)`: how much of the log remained when the next one
            began,
            and if that is another log.
        skew_ns: the offset of its clock.
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
        """The number of the log, counting each that was created anew; the counterpart of `created_ns`."""
        return sum(is_new for _, is_new in self.past)

    @property
    def last_seq(self) -> int:
        return len(self.records)

    def append(self, subject: str, data: bytes) -> int:
        """Store an event, as any publisher may; return its sequence."""
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
        """True if a process that knew the log up to `highest`, in that generation, knows lost records."""
        return any(is_new or keep < highest for keep, is_new in self.past[generation:])

    # ---- reading what is there ---------------------------------------------------------------------
    def last(self, subject: str) -> int:
        """The sequence of the newest record on a subject; 0 if there is none."""
        return self.by_subject[subject][-1] if subject in self.by_subject else 0

    def opened(self, end: int | None = None) -> EpochFence:
        """The epoch fence after the first `end` records."""
        fence = EpochFence()
        for event in self.events[:end]:
            if isinstance(event, EpochOpened):
                fence.admits(event)
        return fence

    def valid(self) -> list[tuple[int, AnyEvent]]:
        """The valid events, with their sequences."""
        fence = EpochFence()
        return [
            (seq, event)
            for seq, event in enumerate(self.events, 1)
            if event is not None and fence.admits(event)
        ]
