"""Ledger of the events that the server acked, noted on the wire.

It parses the NATS protocol in a proxy: a `PUB` with a reply, and the `MSG` that answers it. So an ack counts
from the moment the server sent it, even if its role never receives it.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from tests.chaos.checker import Finding
from tests.chaos.rawlog import Record

_SIZED: Final = {b"PUB": 1, b"HPUB": 2, b"MSG": 1, b"HMSG": 2}
"""Verbs that a payload follows, and how many sizes end their line: of headers, and of all."""


def digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


@dataclass(slots=True)
class Wire:
    """One direction of a connection, split into messages."""

    _rest: bytes = b""

    def feed(self, data: bytes) -> Iterator[tuple[list[bytes], bytes]]:
        """The messages that are now complete: the words of the line, and the payload without headers."""
        self._rest += data
        while (end := self._rest.find(b"\r\n")) >= 0:
            words = self._rest[:end].split()
            sizes = _SIZED.get(words[0].upper() if words else b"", 0)
            if not sizes:
                self._rest = self._rest[end + 2 :]
                continue
            size = int(words[-1])
            if len(self._rest) < end + 2 + size + 2:
                return
            payload = self._rest[end + 2 : end + 2 + size]
            self._rest = self._rest[end + 2 + size + 2 :]
            yield words[:-sizes], payload[int(words[-2]) if sizes == 2 else 0 :]


@dataclass(slots=True)
class Ledger:
    """All acks of one deployment, by the sequence they name."""

    prefix: str = "ds"
    acked: dict[int, tuple[str, bytes]] = field(default_factory=dict)

    def connection(self) -> "Account":
        return Account(self)

    def is_logged(self, subject: str) -> bool:
        """True if the stream stores this subject: all of the deployment's except heartbeats."""
        return subject.startswith(f"{self.prefix}.") and not subject.startswith(f"{self.prefix}.beat.")

    def check(self, records: Iterable[Record], from_seq: int, count: int | None = None) -> list[Finding]:
        """The acked events from a position on that the stream has lost or changed.

        `count` is the number of acks at the time before the records were read.
        """
        found = {record.seq: digest(record.data) for record in records}
        return [
            Finding(
                kind="acked-lost",
                request_id=subject.rpartition(".")[2],
                message=f"an event on {subject} was acked as {seq}, and the log has "
                + ("another one there" if seq in found else "nothing there"),
            )
            for seq, (subject, promised) in sorted(islice(self.acked.items(), count))
            if seq >= from_seq and found.get(seq) != promised
        ]


@dataclass(slots=True)
class Account:
    """One connection's part of the ledger."""

    ledger: Ledger
    _up: Wire = field(default_factory=Wire)
    _down: Wire = field(default_factory=Wire)
    _sent: dict[bytes, tuple[str, bytes]] = field(default_factory=dict)

    def up(self, data: bytes) -> int:
        """Take bytes to the server; return the number of events in them."""
        events = 0
        for words, payload in self._up.feed(data):
            subject = words[1].decode(errors="replace")
            if self.ledger.is_logged(subject):
                events += 1
                if len(words) > 2:
                    self._sent[words[2]] = (subject, digest(payload))
        return events

    def down(self, data: bytes) -> int:
        """Take bytes from the server; return the number of acks in them."""
        acks = 0
        for words, payload in self._down.feed(data):
            sent = self._sent.get(words[1])
            if sent is None:
                continue
            ack = json.loads(payload) if payload[:1] == b"{" else {}
            if "seq" in ack and "error" not in ack:
                self.ledger.acked[ack["seq"]] = sent
                acks += 1
        return acks
