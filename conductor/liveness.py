"""Liveness of workers and conductors, from their heartbeats. Pure: the caller passes the time.

A process is never declared lost because this conductor did not listen. Our own heartbeats go to the server
and come back like everybody's; one that came back is an *echo*. The silence of another process is measured
at an echo, and from the last time when all was well: if two echoes are too far apart (this event loop stood
still, or the connection or the server was away), or the log accepts no events, every process gets the full
time again.

A standby conductor listens too, so that it knows who is alive when it starts to lead.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

_ACK_S: Final = 1.0
"""Seconds without an acknowledgement after which the log counts as unavailable."""
_HEARD_AGAIN_S: Final = 0.75
"""A live process is heard within this many seconds: one and a half heartbeat intervals."""
_WORKING: Final = frozenset({"ready", "draining"})
"""States in which a worker without progress counts as hung; a loading worker does not."""


@dataclass(frozen=True, slots=True)
class Loss:
    """The end of an incarnation, as far as it is known.

    Attributes:
        read_seq: the worker has not read records after this one; None if unknown.
    """

    rank: int
    incarnation: int
    reason: str
    read_seq: int | None = None


class Echoes:
    """Our own heartbeats that came back: the periods in which the silence of others is meaningful.

    Attributes:
        now_s: time of the last echo.
        since_s: start of the current period without a gap.
    """

    def __init__(self, gap_s: float) -> None:
        self._gap_s = gap_s
        self._acked = 0
        self._acked_s = float("-inf")
        self.now_s = float("-inf")
        self.since_s = float("-inf")

    def heard(self, now_s: float, *, unacked: int, acked: int) -> None:
        """Record an echo, with the number of events waiting for the log and of those acknowledged so far."""
        if not unacked or acked != self._acked:
            self._acked, self._acked_s = acked, now_s
        is_late = now_s - self.now_s > self._gap_s
        self.now_s = now_s
        if is_late or now_s - self._acked_s > _ACK_S:
            self.gap()

    def gap(self) -> None:
        """Start a new period: silence before now is not meaningful."""
        self.since_s = self.now_s

    def silence_s(self, heard_s: float) -> float:
        """Seconds of meaningful silence of a process that was last heard at `heard_s`."""
        return self.now_s - max(heard_s, self.since_s)


@dataclass(slots=True)
class _Life:
    """State of one incarnation: last heartbeat and last progress.

    `figures` are its own progress counters. `declared`: it was declared lost. `read_seq`: the position it
    may have read in the log when its heartbeat was due and missing.
    """

    incarnation: int
    heard_s: float
    moved_s: float
    figures: tuple[Any, ...] = ()
    has_work: bool = False
    loop_age_s: float = 0.0
    declared: bool = False
    read_seq: int | None = None


@dataclass(slots=True)
class Workers:
    """The incarnations of workers, according to their heartbeats.

    Attributes:
        silent_s: a worker without a heartbeat for this long is lost.
        hung_s: a worker with work and without progress for this long is lost; 0 disables the check.
    """

    echoes: Echoes
    silent_s: float
    hung_s: float
    _lives: dict[int, _Life] = field(default_factory=dict)

    def know(self, lives: Mapping[int, int], now_s: float, seq: int) -> None:
        """Set the current incarnations by rank, according to the log up to `seq`."""
        self._lives = {
            rank: known
            if (known := self._lives.get(rank)) is not None and known.incarnation == incarnation
            else _Life(incarnation, heard_s=now_s, moved_s=now_s)
            for rank, incarnation in lives.items()
        }
        for life in self._lives.values():
            if life.read_seq is None and now_s - life.heard_s > _HEARD_AGAIN_S:
                life.read_seq = seq

    def hear(self, rank: int, signs: Mapping[str, Any], now_s: float) -> None:
        """Record a worker's heartbeat. A heartbeat of another incarnation is ignored."""
        life = self._lives.get(rank)
        if life is None or signs.get("incarnation") != life.incarnation:
            return
        life.heard_s, life.read_seq = now_s, None
        figures, life.has_work = _figures(signs), _has_work(signs)
        if figures != life.figures or not life.has_work:
            life.figures, life.moved_s = figures, now_s
        age_s = signs.get("loop_age_s", 0.0)
        life.loop_age_s = float(age_s) if isinstance(age_s, int | float) else 0.0

    def lost(self) -> list[Loss]:
        """The incarnations that are over as of the last echo and not yet declared lost."""
        verdicts = [
            (rank, life, self._verdict(life)) for rank, life in self._lives.items() if not life.declared
        ]
        return [
            Loss(rank, life.incarnation, why, life.read_seq)
            for rank, life, why in verdicts
            if why is not None
        ]

    def declare(self, loss: Loss) -> None:
        """Note that the declaration of a loss was sent to the log."""
        life = self._lives.get(loss.rank)
        if life is not None and life.incarnation == loss.incarnation:
            life.declared = True

    def lead(self) -> None:
        """Start a new term: declarations of earlier terms may be void."""
        for life in self._lives.values():
            life.declared = False

    def _verdict(self, life: _Life) -> str | None:
        silent_s = self.echoes.silence_s(life.heard_s)
        if silent_s >= self.silent_s:
            return f"not heard for {silent_s:.1f} s"
        if not self.hung_s:
            return None
        if life.loop_age_s >= self.hung_s:
            return f"its main loop stands still for {life.loop_age_s:.1f} s"
        stuck_s = self.echoes.silence_s(life.moved_s)
        if stuck_s >= self.hung_s:
            return f"has work, and got no further for {stuck_s:.1f} s"
        return None


@dataclass(slots=True)
class Leader:
    """The leading conductor, according to its heartbeats.

    Attributes:
        silent_s: a leader without a heartbeat for this long has lost the leadership.
        answer_s: a leader answers a conductor that has just started within this time.
    """

    echoes: Echoes
    silent_s: float
    answer_s: float
    _heard_s: float | None = None
    _gone: str | None = None

    def hear(self, signs: Mapping[str, Any], epoch: int, now_s: float) -> None:
        """Record a heartbeat of another conductor; `epoch` is the epoch in force as far as it was read."""
        told = signs.get("epoch")
        if not isinstance(told, int) or told < epoch:
            return  # from a deposed leader that does not know it yet
        if signs.get("state") == "leading":
            self.expect(now_s)
        elif signs.get("state") == "leaving" and signs.get("led") is True:
            self.is_gone("the leader has left")

    def expect(self, now_s: float) -> None:
        """Note that a conductor leads or is about to: wait for its heartbeats from now on."""
        self._heard_s, self._gone = now_s, None

    def is_gone(self, why: str) -> None:
        """Note that certainly no conductor leads."""
        self._gone = why

    def gone(self) -> str | None:
        """The reason why no conductor leads, as of the last echo; None if one may lead."""
        if self._gone is not None:
            return self._gone
        if self._heard_s is None:  # after our start: a leader has received our first heartbeat and answers it
            silent_s, most_s = self.echoes.now_s - self.echoes.since_s, self.answer_s
        else:
            silent_s, most_s = self.echoes.silence_s(self._heard_s), self.silent_s
        return f"no leader was heard for {silent_s:.1f} s" if silent_s >= most_s else None


def _figures(signs: Mapping[str, Any]) -> tuple[Any, ...]:
    """A worker's own progress counters, without what others do to it."""
    meters = _map(signs.get("meters"))
    edges, tensors = _map(meters.get("edges")), _map(meters.get("tensors"))
    return (
        signs.get("steps"),
        *(meters.get(name) for name in ("sequences", "computed_tokens", "sampled_tokens")),
        *(edges.get(name) for name in ("told", "items", "chunks")),
        tensors.get("puts"),
    )


def _has_work(signs: Mapping[str, Any]) -> bool:
    """Tell whether a worker should progress. Not while its sequences are held, or the log accepts nothing."""
    if signs.get("state") not in _WORKING or _count(_map(_map(signs.get("meters")).get("log")), "unacked"):
        return False
    running, held, waiting = (_count(signs, name) for name in ("running", "held", "waiting"))
    return running > held or (waiting > 0 and not running)


def _map(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _count(signs: Mapping[str, Any], name: str) -> int:
    value = signs.get(name)
    return value if isinstance(value, int) else 0
