"""Who is alive, by the beats; pure: our clock is handed in.

Nobody is taken for dead because we did not listen. Time counts only as far as our own beats tell it: they
go to the server and come back, as everybody's do. So another's silence is measured at an *echo*, a beat of
ours that came back, and from the last time when all was well: if two echoes are too far apart (our loop
stood still, the connection or the server was away), or the log does not take what is written, everybody is
given the whole time again.

A conductor that follows listens just as well, so that it knows who is alive once it leads.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

_ACK_S: Final = 1.0
"""For so long the log may take none of what is posted, and is well."""
_HEARD_AGAIN_S: Final = 0.75
"""Who lives is heard again within this time: half as long again as from beat to beat."""
_WORKING: Final = frozenset({"ready", "draining"})
"""States in which a worker that gets no further is hung; while it loads, it is not."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A life that is over, as far as can be told.

    Attributes:
        read_seq: what is stored behind this it has not read; None where that cannot be told.
    """

    rank: int
    incarnation: int
    reason: str
    read_seq: int | None = None


class Echoes:
    """Our own beats that came back: the time in which others' silence means something.

    Attributes:
        now_s: when the last one came.
        since_s: since when they come without a gap.
    """

    def __init__(self, gap_s: float) -> None:
        self._gap_s = gap_s
        self._acked = 0
        self._acked_s = float("-inf")
        self.now_s = float("-inf")
        self.since_s = float("-inf")

    def heard(self, now_s: float, *, unacked: int, acked: int) -> None:
        """One came; so many events wait for the log, and so many has it taken so far."""
        if not unacked or acked != self._acked:
            self._acked, self._acked_s = acked, now_s
        is_late = now_s - self.now_s > self._gap_s
        self.now_s = now_s
        if is_late or now_s - self._acked_s > _ACK_S:
            self.gap()

    def gap(self) -> None:
        """What was heard until now says nothing of those who were not."""
        self.since_s = self.now_s

    def silence_s(self, heard_s: float) -> float:
        """For how long one was silent that was heard last at `heard_s`."""
        return self.now_s - max(heard_s, self.since_s)


@dataclass(slots=True)
class _Life:
    """What is known of a worker's life: when it was heard last, and when it got further.

    `figures` are what it counts of its own doing; `declared`: it was said to be lost. `read_seq`: how far it
    may have read the log, where it should have been heard again since and was not.
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
    """The workers' lives, as their beats tell of them.

    Attributes:
        silent_s: who was not heard for so long is lost.
        hung_s: and who got no further for so long, with work to do; 0 is never.
    """

    echoes: Echoes
    silent_s: float
    hung_s: float
    _lives: dict[int, _Life] = field(default_factory=dict)

    def know(self, lives: Mapping[int, int], now_s: float, seq: int) -> None:
        """Which lives there are, by rank, as the log tells up to `seq`."""
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
        """A worker's beat; one of another life says nothing of this one."""
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
        """The lives that are over, as of the last echo, and were not declared so yet."""
        verdicts = [
            (rank, life, self._verdict(life)) for rank, life in self._lives.items() if not life.declared
        ]
        return [
            Loss(rank, life.incarnation, why, life.read_seq)
            for rank, life, why in verdicts
            if why is not None
        ]

    def declare(self, loss: Loss) -> None:
        """It is on its way into the log."""
        life = self._lives.get(loss.rank)
        if life is not None and life.incarnation == loss.incarnation:
            life.declared = True

    def lead(self) -> None:
        """A new term: what was declared in an earlier one may be void."""
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
    """Whoever leads, as its beats tell.

    Attributes:
        silent_s: who leads and was not heard for so long leads no more.
        answer_s: within this time whoever leads has answered a conductor that has just started.
    """

    echoes: Echoes
    silent_s: float
    answer_s: float
    _heard_s: float | None = None
    _gone: str | None = None

    def hear(self, signs: Mapping[str, Any], epoch: int, now_s: float) -> None:
        """A beat of another conductor; `epoch` is the one in force, as far as we have read."""
        told = signs.get("epoch")
        if not isinstance(told, int) or told < epoch:
            return  # of one that is deposed, and does not know it
        if signs.get("state") == "leading":
            self.expect(now_s)
        elif signs.get("state") == "leaving" and signs.get("led") is True:
            self.is_gone("the leader has left")

    def expect(self, now_s: float) -> None:
        """Somebody leads, or is about to: from now on listen for as long as that may be silent."""
        self._heard_s, self._gone = now_s, None

    def is_gone(self, why: str) -> None:
        """Nobody leads, that is certain."""
        self._gone = why

    def gone(self) -> str | None:
        """Why nobody leads, as of the last echo; None if somebody may."""
        if self._gone is not None:
            return self._gone
        if self._heard_s is None:  # we have just started: who leads heard our first beat too, and answers
            silent_s, most_s = self.echoes.now_s - self.echoes.since_s, self.answer_s
        else:
            silent_s, most_s = self.echoes.silence_s(self._heard_s), self.silent_s
        return f"no leader was heard for {silent_s:.1f} s" if silent_s >= most_s else None


def _figures(signs: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a worker counts of its own doing; what others do to it is no sign of life."""
    meters = _map(signs.get("meters"))
    edges, tensors = _map(meters.get("edges")), _map(meters.get("tensors"))
    return (
        signs.get("steps"),
        *(meters.get(name) for name in ("sequences", "computed_tokens", "sampled_tokens")),
        *(edges.get(name) for name in ("told", "items", "chunks")),
        tensors.get("puts"),
    )


def _has_work(signs: Mapping[str, Any]) -> bool:
    """Whether it should get further. Not while its sequences are held back, or the log takes nothing."""
    if signs.get("state") not in _WORKING or _count(_map(_map(signs.get("meters")).get("log")), "unacked"):
        return False
    running, held, waiting = (_count(signs, name) for name in ("running", "held", "waiting"))
    return running > held or (waiting > 0 and not running)


def _map(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _count(signs: Mapping[str, Any], name: str) -> int:
    value = signs.get(name)
    return value if isinstance(value, int) else 0
