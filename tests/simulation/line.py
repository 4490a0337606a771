"""One process's connection to the log, in place of `shared.log.nats.jetstream`.

It has a reader, and an outbox that resends events until they are acked. A process that has read, or been
acked,
past the point to which the log went back must stop.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from shared.events import Event, encode
from tests.simulation.log import SimLog
from tests.simulation.reading import Reader

MAX_POSTED: Final = 24
"""So many events may be posted and not acked; who posts more has to wait."""


class RegressedError(Exception):
    """The log is another one, or shorter than this process has seen it."""


@dataclass(slots=True)
class Entry:
    """One event in an outbox.

    Attributes:
        expected: store it only if this is the subject's last sequence.
        stored: called with its position; `refused`, if the expectation did not hold.
        sent: how often it was sent.
    """

    subject: str
    data: bytes
    stored: Callable[[int], None] | None = None
    expected: int | None = None
    refused: Callable[[], None] | None = None
    sent: int = 0


@dataclass(slots=True)
class Line:
    """One process's connection to the log.

    Attributes:
        highest: the last record that it has read outside of its reader, or been acked.
        generation: the log's generation at the last check; `is_checked`: it was checked since the last
            outage.
        is_cut: the log is unreachable.
        acked: the number of acked events.
    """

    log: SimLog
    chance: random.Random
    reader: Reader
    highest: int = 0
    generation: int = 0
    is_cut: bool = False
    is_checked: bool = True
    acked: int = 0
    outbox: deque[Entry] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.generation = self.log.generation

    # ---- the connection ----------------------------------------------------------------------------
    @property
    def is_online(self) -> bool:
        """True if the log answers. After an outage it is first checked to be the same log.

        Raises:
            RegressedError: it is not.
        """
        if not self.log.is_up or self.is_cut:
            self.is_checked = False
            return False
        if self.is_stale:
            if self.log.goes_back_on(max(self.highest, self.reader.reached), self.generation):
                raise RegressedError
            self.reader.disconnect()
            self.generation, self.is_checked = self.log.generation, True
        return True

    @property
    def is_stale(self) -> bool:
        """True if the log has changed since the last check."""
        return not self.is_checked or self.generation != self.log.generation

    @property
    def is_full(self) -> bool:
        """True if so many events wait for an ack that no more may be posted."""
        return len(self.outbox) >= MAX_POSTED

    # ---- writing -----------------------------------------------------------------------------------
    def post(self, subject: str, event: Event, stored: Callable[[int], None] | None = None) -> None:
        """Store an event; call back once it is stored."""
        self.outbox.append(Entry(subject, encode(event), stored))

    def publish(
        self,
        subject: str,
        event: Event,
        expected: int,
        stored: Callable[[int], None],
        refused: Callable[[], None],
    ) -> None:
        """Store an event if `expected` is the subject's last sequence; call back with the result."""
        self.outbox.append(Entry(subject, encode(event), stored, expected, refused))

    def transmit(self, p_lost: float, p_ack_lost: float) -> str:
        """Send one event: the next new one, or one that was not acked; return what went wrong."""
        entry = self._next()
        entry.sent += 1
        if self.log.is_full:
            return "refused: the log is full"
        if self.chance.random() < p_lost:
            return "lost"
        if entry.expected is not None and self.log.last(entry.subject) != entry.expected:
            self._misses(entry)
            return ""
        seq = self.log.append(entry.subject, entry.data)
        if self.chance.random() < p_ack_lost:
            return "stored, and its ack lost"
        self._acked(entry, seq)
        return ""

    def go_down(self, *, loses: bool) -> None:
        """The server dies: each event just sent is stored or lost, and no ack arrives."""
        is_known = not self.is_cut and not self.is_stale
        self.is_checked = False
        under_way = list(self.outbox)[: self.chance.randint(0, 4)] if loses and is_known else []
        for entry in under_way:
            entry.sent += 1
            is_due = entry.expected is None or self.log.last(entry.subject) == entry.expected
            if is_due and not self.log.is_full and self.chance.random() < 0.5:
                self.log.append(entry.subject, entry.data)

    def _next(self) -> Entry:
        fresh = next((entry for entry in self.outbox if not entry.sent), None)
        again = [entry for entry in self.outbox if entry.sent]
        if again and (fresh is None or self.chance.random() < 0.5):
            return self.chance.choice(again)
        assert fresh is not None
        return fresh

    def _misses(self, entry: Entry) -> None:
        """The expectation does not hold, perhaps because an earlier copy was stored."""
        assert entry.expected is not None
        successor = next(
            (seq for seq in self.log.by_subject[entry.subject] if seq > entry.expected),
            None,
        )
        if entry.sent > 1 and successor is not None and self.log.records[successor - 1].data == entry.data:
            self._acked(entry, successor)
            return
        self.outbox.remove(entry)
        if entry.refused is not None:
            entry.refused()

    def _acked(self, entry: Entry, seq: int) -> None:
        self.outbox.remove(entry)
        self.acked += 1
        self.highest = max(self.highest, seq)
        if entry.stored is not None:
            entry.stored(seq)
