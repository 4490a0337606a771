"""Base class of simulated processes: a connection to the log, and one small action at a time."""

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

from shared.events import Event
from shared.log.port import StoredRecord
from shared.subjects import Address
from tests.simulation.line import Line, RegressedError
from tests.simulation.reading import Reader

if TYPE_CHECKING:
    from tests.simulation.simulator import Simulation

T = TypeVar("T")
BEAT_MS: Final = 500


def drawn(from_these: list[T], chance: random.Random) -> T:
    """Remove and return a random element; the order of the others does not matter."""
    place = int(chance.random() * len(from_these))
    from_these[place], from_these[-1] = from_these[-1], from_these[place]
    return from_these.pop()


class Process:
    """A process that uses the log.

    Attributes:
        is_alive: it was not killed and has not ended.
        is_frozen: it does nothing for a while without knowing it (SIGSTOP, a long pause).
        hung_ms: since when its main loop blocks while its heartbeats continue; None while it does not.
    """

    def __init__(self, sim: "Simulation", name: str, start: int) -> None:
        self.sim, self.name = sim, name
        self.is_alive = True
        self.is_frozen = False
        self.hung_ms: int | None = None
        self.line = Line(sim.log, sim.random, Reader(sim.log, self.wants, start), highest=start)

    def __repr__(self) -> str:
        return self.name

    @property
    def is_reachable(self) -> bool:
        """True if others receive its messages."""
        return self.is_alive and not self.is_frozen and not self.line.is_cut and self.sim.log.is_up

    # ---- what each kind of process does ------------------------------------------------------------
    def wants(self, address: Address) -> bool:
        """True if it reads records on this subject."""
        raise NotImplementedError

    def take(self, record: StoredRecord) -> None:
        """Read one record."""
        raise NotImplementedError

    def work(self) -> bool:
        """Do a piece of own work; return False if there is none."""
        return False

    def signs(self) -> dict[str, Any]:
        """The content of its heartbeats; empty if no process reads them."""
        return {}

    def end(self, why: str) -> None:
        """End the process; its supervisor starts another."""
        self.is_alive = False
        self.sim.tell(f"{self} {why}")
        self.sim.replace(self)

    # ---- one thing at a time -----------------------------------------------------------------------
    def act(self) -> bool:
        """Do one thing; return False if there is nothing to do."""
        if not self.is_alive or self.is_frozen or self.hung_ms is not None:
            return False
        try:
            actions = self._actions_with_log() if self.line.is_online else []
        except RegressedError:
            self.sim.saw("a process finds that the log went back")
            self.regressed()
            return True
        chance = self.sim.random
        if actions and chance.random() < (0.2 if self.sim.log.is_slow else 0.7):
            chance.choice(actions)()
            return True
        if self.work():
            return True
        if actions:
            chance.choice(actions)()
        return bool(actions)

    def regressed(self) -> None:
        """The log went back before what this process knows: it stops."""
        self.end("stops: the log went back")

    def post(self, subject: str, event: Event, stored: Callable[[int], None] | None = None) -> None:
        self.line.post(subject, event, stored)

    def _actions_with_log(self) -> list[Callable[[], object]]:
        actions: list[Callable[[], object]] = []
        if self.line.outbox and not (self.sim.log.is_full and self.sim.random.random() < 0.9):
            actions.append(self._transmit)
        if self.line.reader.has_records and self.may_read:
            actions.append(self._read)
        if self.line.reader.has_deliveries:
            actions.append(self._receive)
        return actions

    @property
    def may_read(self) -> bool:
        """True if it takes another record now."""
        return True

    def _transmit(self) -> None:
        plan, faulty = self.sim.plan, self.sim.is_faulty
        went = self.line.transmit(plan.p_lost * faulty, plan.p_ack_lost * faulty)
        if went:
            self.sim.saw(f"an event is {went}")

    def _receive(self) -> None:
        went = self.line.reader.deliver(self.sim.random, self.sim.plan.p_lost * self.sim.is_faulty)
        if went:
            self.sim.saw(f"a record is {went}")

    def _read(self) -> None:
        self.take(self.line.reader.take())
