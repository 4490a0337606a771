"""The liveness of conductors and workers, by their heartbeats: pure; the caller supplies the time.

Heartbeats are sent twice a second and not stored. A process counts as alive while its last heartbeat is
younger than `FRESH_S`. The deployment is ready when the log answers, a conductor leads, and the worker of
every rank is ready.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import msgspec

FRESH_S: Final = 3.0


@dataclass(frozen=True, slots=True)
class ReceivedHeartbeat:
    """The last heartbeat of one process. `facts` are its other fields."""

    state: str
    facts: dict[str, Any]
    received_s: float


@dataclass(slots=True)
class Liveness:
    """The heartbeats received so far.

    Attributes:
        ranks: the ranks whose workers the deployment needs.
        has_been_ready: the ranks whose worker was ready at least once, by the log or by a heartbeat.
    """

    ranks: Sequence[int]
    conductors: dict[str, ReceivedHeartbeat] = field(default_factory=dict)
    workers: dict[int, ReceivedHeartbeat] = field(default_factory=dict)
    has_been_ready: set[int] = field(default_factory=set)
    _all_were_ready: bool = False

    def receive(self, subject: str, payload: bytes, now_s: float) -> None:
        """Take one heartbeat; malformed ones are ignored."""
        match subject.split("."):
            case [_, "beat", "worker" | "conductor" as role, name]:
                pass
            case _:
                return
        try:
            facts = msgspec.msgpack.decode(payload, type=dict[str, Any])
        except msgspec.MsgspecError:
            return
        heartbeat = ReceivedHeartbeat(state=str(facts.get("state", "")), facts=facts, received_s=now_s)
        if role == "conductor":
            self._receive_conductor(name, heartbeat)
            self._forget_old_conductors(now_s)
        elif name.isdecimal() and int(name) in self.ranks:
            self.workers[int(name)] = heartbeat
            if heartbeat.state == "ready":
                self.has_been_ready.add(int(name))
        self._all_were_ready = self._all_were_ready or not self.missing(now_s, log_answers=True)

    def note_worker(self, rank: int) -> None:
        """Note that the log holds an incarnation of this rank: its worker has been ready."""
        if rank in self.ranks:
            self.has_been_ready.add(rank)

    @property
    def every_worker_was_ready(self) -> bool:
        return self.has_been_ready.issuperset(self.ranks)

    def missing(self, now_s: float, *, log_answers: bool) -> list[str]:
        """The needed parts that are missing, one sentence each; empty when all are ready."""
        missing = [] if log_answers else ["the log does not answer"]
        if not any(
            heartbeat.state == "leading" and self.is_fresh(heartbeat, now_s)
            for heartbeat in self.conductors.values()
        ):
            missing.append("no conductor leads")
        for rank in self.ranks:
            heartbeat = self.workers.get(rank)
            if heartbeat is None or not self.is_fresh(heartbeat, now_s):
                missing.append(f"the worker of rank {rank} sends no heartbeats")
            elif heartbeat.state != "ready":
                missing.append(f"the worker of rank {rank} is {heartbeat.state}{_progress(heartbeat)}")
        return missing

    def overview(
        self, now_s: float, *, log_answers: bool, is_draining: bool, running: int = 0, log_problem: str = ""
    ) -> dict[str, Any]:
        """The document of `/health`, as far as it is not about the gateway.

        `status` has the words that M*'s clients expect; `state` is more detailed. `running` is the number of
        answers that the gateway gives, `log_problem` the reason for which the log takes nothing new, if any.
        """
        missing = self.missing(now_s, log_answers=log_answers)
        if log_problem:
            missing.append(log_problem)
        if is_draining:
            missing.append("this gateway is shutting down")
        return {
            "status": "healthy" if not missing else "degraded" if self._all_were_ready else "loading",
            "state": self._state(is_missing=bool(missing), is_draining=is_draining, running=running),
            "missing": missing,
            "log": {"connected": log_answers},
            "conductors": {name: _shown(one, now_s) for name, one in sorted(self.conductors.items())},
            "workers": {str(rank): _shown(one, now_s) for rank, one in sorted(self.workers.items())},
        }

    def _state(self, *, is_missing: bool, is_draining: bool, running: int) -> str:
        """The deployment's state as this gateway knows it."""
        if is_draining:
            return "draining"
        if is_missing:
            if self._all_were_ready:
                return "degraded"
            return "loading" if self.workers or self.has_been_ready else "uninitialized"
        return "busy" if running or any(map(_is_busy, self.workers.values())) else "ready"

    def _receive_conductor(self, name: str, heartbeat: ReceivedHeartbeat) -> None:
        """Take a conductor's heartbeat. Of several that lead, the one in the highest epoch does.

        A conductor that left in order is removed.
        """
        if heartbeat.state == "leaving":
            self.conductors.pop(name, None)
            return
        self.conductors[name] = heartbeat
        leading = {name: one for name, one in self.conductors.items() if one.state == "leading"}
        in_force = max(map(_epoch, leading.values()), default=0)
        for other, claimed in leading.items():
            if _epoch(claimed) < in_force:
                self.conductors[other] = replace(claimed, state="deposed")

    @staticmethod
    def is_fresh(heartbeat: ReceivedHeartbeat, now_s: float) -> bool:
        """True if its sender counts as alive."""
        return now_s - heartbeat.received_s < FRESH_S

    def _forget_old_conductors(self, now_s: float) -> None:
        """Remove silent conductors: each process has its own name, so restarts would accumulate."""
        for name in [name for name, one in self.conductors.items() if now_s - one.received_s > 10 * FRESH_S]:
            del self.conductors[name]


def _shown(heartbeat: ReceivedHeartbeat, now_s: float) -> dict[str, Any]:
    facts = {
        name: fact for name, fact in heartbeat.facts.items() if name != "meters"
    }  # those are for /metrics
    state = "busy" if _is_busy(heartbeat) else heartbeat.state
    return {**facts, "state": state, "silent_s": round(now_s - heartbeat.received_s, 1)}


def _epoch(heartbeat: ReceivedHeartbeat) -> int:
    epoch = heartbeat.facts.get("epoch")
    return epoch if isinstance(epoch, int) else 0


def _is_busy(heartbeat: ReceivedHeartbeat) -> bool:
    """True if it is ready and has work."""
    return heartbeat.state == "ready" and any(heartbeat.facts.get(work) for work in ("running", "waiting"))


def _progress(heartbeat: ReceivedHeartbeat) -> str:
    progress = heartbeat.facts.get("progress")
    return f" ({progress:.0%})" if isinstance(progress, int | float) and heartbeat.state == "loading" else ""
