"""Liveness of workers and conductors, from their heartbeats. Pure: the caller passes the time.

A process is never declared lost because this conductor did not listen. The conductor also receives its own
heartbeats from the server; one of them is an *echo*. The silence of another process is measured at an echo,
from its last heartbeat or from the start of the current period. A new period starts, and every process gets
the full time again, if the log accepts no events or two echoes are too far apart: this event loop was
blocked, or the connection or the server was unavailable.

A standby conductor receives heartbeats too, so that it knows the live processes when it starts to lead.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

_ACK_S: Final = 1.0
"""Seconds without an acknowledgement after which the log counts as unavailable."""
_RECEIVED_WITHIN_S: Final = 0.75
"""A live process sends a heartbeat within this many seconds: one and a half intervals."""
_WORKING: Final = frozenset({"ready", "draining"})
"""States in which a worker without progress counts as hung; a loading worker does not."""


@dataclass(frozen=True, slots=True)
class Loss:
    """The end of an incarnation, as far as it is known.

    Attributes:
        read_seq: the worker has not read records after this one; None if unknown.
        silent_s: the time without a heartbeat, if that is the reason.
    """

    rank: int
    incarnation: int
    reason: str
    read_seq: int | None = None
    silent_s: float = 0.0


class Echoes:
    """Echoes of our own heartbeats: the periods in which the silence of other processes is meaningful.

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

    def receive(self, now_s: float, *, unacked: int, acked: int) -> None:
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

    def silence_s(self, received_s: float) -> float:
        """Seconds of meaningful silence of a process whose last heartbeat was received at `received_s`."""
        return self.now_s - max(received_s, self.since_s)


@dataclass(slots=True)
class _WorkerState:
    """State of one incarnation: last heartbeat and last progress.

    `progress` are its own progress counters. `declared`: it was declared lost. `read_seq`: the position it
    may have read in the log when its heartbeat was due and missing.
    """

    incarnation: int
    received_s: float
    progressed_s: float
    progress: tuple[Any, ...] = ()
    has_work: bool = False
    loop_age_s: float = 0.0
    declared: bool = False
    read_seq: int | None = None


@dataclass(slots=True)
class WorkerLiveness:
    """The incarnations of workers, according to their heartbeats.

    Attributes:
        silent_s: a worker without a heartbeat for this long is lost.
        hung_s: a worker with work and without progress for this long is lost; 0 disables the check.
    """

    echoes: Echoes
    silent_s: float
    hung_s: float
    _workers: dict[int, _WorkerState] = field(default_factory=dict)

    def set_incarnations(self, incarnations: Mapping[int, int], now_s: float, seq: int) -> None:
        """Set the current incarnations by rank, according to the log up to `seq`."""
        self._workers = {
            rank: known
            if (known := self._workers.get(rank)) is not None and known.incarnation == incarnation
            else _WorkerState(incarnation, received_s=now_s, progressed_s=now_s)
            for rank, incarnation in incarnations.items()
        }
        for worker in self._workers.values():
            if worker.read_seq is None and now_s - worker.received_s > _RECEIVED_WITHIN_S:
                worker.read_seq = seq

    def receive(self, rank: int, heartbeat: Mapping[str, Any], now_s: float) -> None:
        """Record a worker's heartbeat. A heartbeat of another incarnation is ignored."""
        worker = self._workers.get(rank)
        if worker is None or heartbeat.get("incarnation") != worker.incarnation:
            return
        worker.received_s, worker.read_seq = now_s, None
        progress, worker.has_work = _progress(heartbeat), _has_work(heartbeat)
        if progress != worker.progress or not worker.has_work:
            worker.progress, worker.progressed_s = progress, now_s
        age_s = heartbeat.get("loop_age_s", 0.0)
        worker.loop_age_s = float(age_s) if isinstance(age_s, int | float) else 0.0

    def lost(self) -> list[Loss]:
        """The incarnations that are over as of the last echo and not yet declared lost."""
        verdicts = [
            (rank, worker, self._verdict(worker))
            for rank, worker in self._workers.items()
            if not worker.declared
        ]
        return [
            Loss(rank, worker.incarnation, why, worker.read_seq, self._silence_s(worker))
            for rank, worker, why in verdicts
            if why is not None
        ]

    def declare(self, loss: Loss) -> None:
        """Note that the declaration of a loss was sent to the log."""
        worker = self._workers.get(loss.rank)
        if worker is not None and worker.incarnation == loss.incarnation:
            worker.declared = True

    def start_term(self) -> None:
        """Start a new term: declarations of earlier terms may be void."""
        for worker in self._workers.values():
            worker.declared = False

    def _silence_s(self, worker: _WorkerState) -> float:
        """The silence for which a worker is lost; 0 if it is lost for another reason."""
        silent_s = self.echoes.silence_s(worker.received_s)
        return round(silent_s, 3) if silent_s >= self.silent_s else 0.0

    def _verdict(self, worker: _WorkerState) -> str | None:
        silent_s = self.echoes.silence_s(worker.received_s)
        if silent_s >= self.silent_s:
            return f"no heartbeat for {silent_s:.1f} s"
        if not self.hung_s:
            return None
        if worker.loop_age_s >= self.hung_s:
            return f"its main loop has not run for {worker.loop_age_s:.1f} s"
        stuck_s = self.echoes.silence_s(worker.progressed_s)
        if stuck_s >= self.hung_s:
            return f"has work, but made no progress for {stuck_s:.1f} s"
        return None


@dataclass(slots=True)
class LeaderLiveness:
    """The leading conductor, according to its heartbeats.

    Attributes:
        silent_s: a leader without a heartbeat for this long has lost the leadership.
        answer_s: a leader answers a conductor that has just started within this time.
    """

    echoes: Echoes
    silent_s: float
    answer_s: float
    _received_s: float | None = None
    _absence: str | None = None

    def receive(self, heartbeat: Mapping[str, Any], epoch: int, now_s: float) -> None:
        """Record a heartbeat of another conductor; `epoch` is the epoch in force as far as it was read."""
        its_epoch = heartbeat.get("epoch")
        if not isinstance(its_epoch, int) or its_epoch < epoch:
            return  # from a deposed leader that does not know it yet
        if heartbeat.get("state") == "leading":
            self.expect(now_s)
        elif heartbeat.get("state") == "leaving" and heartbeat.get("led") is True:
            self.set_absent("the leader has left")

    def expect(self, now_s: float) -> None:
        """Note that a conductor leads or is about to: wait for its heartbeats from now on."""
        self._received_s, self._absence = now_s, None

    def set_absent(self, why: str) -> None:
        """Note that certainly no conductor leads."""
        self._absence = why

    def absence(self) -> str | None:
        """The reason why no conductor leads, as of the last echo; None if one may lead."""
        if self._absence is not None:
            return self._absence
        if self._received_s is None:  # after our start: a leader answers our first heartbeat
            silent_s, most_s = self.echoes.now_s - self.echoes.since_s, self.answer_s
        else:
            silent_s, most_s = self.echoes.silence_s(self._received_s), self.silent_s
        return f"no heartbeat of a leader for {silent_s:.1f} s" if silent_s >= most_s else None


def _progress(heartbeat: Mapping[str, Any]) -> tuple[Any, ...]:
    """A worker's progress counters, without counters that other processes change."""
    meters = _map(heartbeat.get("meters"))
    edges, tensors = _map(meters.get("edges")), _map(meters.get("tensors"))
    return (
        heartbeat.get("steps"),
        *(meters.get(name) for name in ("sequences", "computed_tokens", "sampled_tokens")),
        *(edges.get(name) for name in ("told", "items", "chunks")),
        tensors.get("puts"),
    )


def _has_work(heartbeat: Mapping[str, Any]) -> bool:
    """Tell whether a worker should progress. Not while its sequences are held, or the log accepts nothing."""
    log = _map(_map(heartbeat.get("meters")).get("log"))
    if heartbeat.get("state") not in _WORKING or _count(log, "unacked"):
        return False
    running, held, waiting = (_count(heartbeat, name) for name in ("running", "held", "waiting"))
    return running > held or (waiting > 0 and not running)


def _map(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _count(heartbeat: Mapping[str, Any], name: str) -> int:
    value = heartbeat.get(name)
    return value if isinstance(value, int) else 0
