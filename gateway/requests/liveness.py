"""Who is there, by the beats: pure; time is handed in.

Beats are said twice a second and not stored. A role counts as there while its last beat is younger than
`FRESH_S`. Ready is: the log answers, a conductor leads, and the worker of every rank is ready.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import msgspec

FRESH_S: Final = 3.0


@dataclass(frozen=True, slots=True)
class Beat:
    """The last word of one process."""

    state: str
    facts: dict[str, Any]
    heard_s: float


@dataclass(slots=True)
class Presence:
    """The beats heard so far.

    Attributes:
        ranks: whose workers are needed.
        has_been_ready: ranks whose worker was ready at least once, as far as the log or the beats tell.
    """

    ranks: Sequence[int]
    conductors: dict[str, Beat] = field(default_factory=dict)
    workers: dict[int, Beat] = field(default_factory=dict)
    has_been_ready: set[int] = field(default_factory=set)
    _all_were_ready: bool = False

    def hear(self, subject: str, payload: bytes, now_s: float) -> None:
        """Take one beat; what is none is passed over."""
        match subject.split("."):
            case [_, "beat", "worker" | "conductor" as role, name]:
                pass
            case _:
                return
        try:
            facts = msgspec.msgpack.decode(payload, type=dict[str, Any])
        except msgspec.MsgspecError:
            return
        beat = Beat(state=str(facts.get("state", "")), facts=facts, heard_s=now_s)
        if role == "conductor":
            self._hear_conductor(name, beat)
            self._forget_old_conductors(now_s)
        elif name.isdecimal() and int(name) in self.ranks:
            self.workers[int(name)] = beat
            if beat.state == "ready":
                self.has_been_ready.add(int(name))
        self._all_were_ready = self._all_were_ready or not self.missing(now_s, log_answers=True)

    def saw_worker(self, rank: int) -> None:
        """The log holds a life of this rank: its worker has been ready."""
        if rank in self.ranks:
            self.has_been_ready.add(rank)

    @property
    def every_worker_was_ready(self) -> bool:
        return self.has_been_ready.issuperset(self.ranks)

    def missing(self, now_s: float, *, log_answers: bool) -> list[str]:
        """What is needed and not there, in words; nothing when all is ready."""
        missing = [] if log_answers else ["the log does not answer"]
        if not any(
            beat.state == "leading" and self.is_fresh(beat, now_s) for beat in self.conductors.values()
        ):
            missing.append("no conductor leads")
        for rank in self.ranks:
            beat = self.workers.get(rank)
            if beat is None or not self.is_fresh(beat, now_s):
                missing.append(f"the worker of rank {rank} is not heard")
            elif beat.state != "ready":
                missing.append(f"the worker of rank {rank} is {beat.state}{_progress(beat)}")
        return missing

    def overview(
        self, now_s: float, *, log_answers: bool, is_draining: bool, running: int = 0, log_room: str = ""
    ) -> dict[str, Any]:
        """The state as `/health` shows it; `running` are the answers that this gateway gives.

        `log_room` says what is wrong with the log's room, if anything.

        `status` is the verdict, in the word M*'s clients look for; `state` says more.
        """
        missing = self.missing(now_s, log_answers=log_answers)
        if log_room:
            missing.append(log_room)
        if is_draining:
            missing.append("this gateway is shutting down")
        return {
            "status": "healthy" if not missing else "degraded" if self._all_were_ready else "loading",
            "state": self._state(is_missing=bool(missing), is_draining=is_draining, running=running),
            "missing": missing,
            "log": {"connected": log_answers},
            "conductors": {name: _shown(beat, now_s) for name, beat in sorted(self.conductors.items())},
            "workers": {str(rank): _shown(beat, now_s) for rank, beat in sorted(self.workers.items())},
        }

    def _state(self, *, is_missing: bool, is_draining: bool, running: int) -> str:
        """Where the deployment is in its life, as far as this gateway can tell."""
        if is_draining:
            return "draining"
        if is_missing:
            if self._all_were_ready:
                return "degraded"
            return "loading" if self.workers or self.has_been_ready else "uninitialized"
        return "busy" if running or any(map(_is_busy, self.workers.values())) else "ready"

    def _hear_conductor(self, name: str, beat: Beat) -> None:
        """One leads: of several that say so the one in the highest epoch. Who left in order is gone."""
        if beat.state == "leaving":
            self.conductors.pop(name, None)
            return
        self.conductors[name] = beat
        leading = {name: beat for name, beat in self.conductors.items() if beat.state == "leading"}
        in_force = max(map(_epoch, leading.values()), default=0)
        for other, said in leading.items():
            if _epoch(said) < in_force:
                self.conductors[other] = replace(said, state="deposed")

    @staticmethod
    def is_fresh(beat: Beat, now_s: float) -> bool:
        """Whether who said it counts as there."""
        return now_s - beat.heard_s < FRESH_S

    def _forget_old_conductors(self, now_s: float) -> None:
        """Each life of a conductor has a name of its own: a day's restarts must not pile up."""
        for name in [name for name, beat in self.conductors.items() if now_s - beat.heard_s > 10 * FRESH_S]:
            del self.conductors[name]


def _shown(beat: Beat, now_s: float) -> dict[str, Any]:
    facts = {name: fact for name, fact in beat.facts.items() if name != "meters"}  # those are for /metrics
    state = "busy" if _is_busy(beat) else beat.state
    return {**facts, "state": state, "silent_s": round(now_s - beat.heard_s, 1)}


def _epoch(beat: Beat) -> int:
    epoch = beat.facts.get("epoch")
    return epoch if isinstance(epoch, int) else 0


def _is_busy(beat: Beat) -> bool:
    """Whether it is ready, and has something to do."""
    return beat.state == "ready" and any(beat.facts.get(work) for work in ("running", "waiting"))


def _progress(beat: Beat) -> str:
    progress = beat.facts.get("progress")
    return f" ({progress:.0%})" if isinstance(progress, int | float) and beat.state == "loading" else ""
