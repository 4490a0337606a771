"""Which life of each rank is the present one: what of their tensors can still be reached.

A pure fold of `worker.joined`, `worker.leaving` and `worker.lost`, in log order. A life is known by the id of
its `worker.joined`; a second copy is no second life, and one that says itself again, because the log forgets,
names the life it is of.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from shared.events import WorkerJoined, WorkerLeaving, WorkerLost
from shared.ids import Rank


@dataclass(frozen=True, slots=True)
class Met:
    """A rank's life has begun; `cards` say how its tensors are reached."""

    rank: int
    incarnation: int
    cards: Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class Parted:
    """A rank's life is over."""

    rank: int
    incarnation: int


Change: TypeAlias = Met | Parted


@dataclass(slots=True)
class Lives:
    """All ranks' lives so far.

    Attributes:
        known: the ids of every `worker.joined` that was read.
        present: the lives that are not over, by rank.
    """

    known: set[str] = field(default_factory=set)
    present: dict[int, Met] = field(default_factory=dict)
    _latest: dict[int, int] = field(default_factory=dict)

    def joined(self, event: WorkerJoined, seq: int) -> Met | None:
        """A life, stored at `seq`; None for a copy, and for one that a later life has followed."""
        incarnation = event.incarnation or seq
        if event.id in self.known:
            return None
        self.known.add(event.id)
        if incarnation <= self._latest.get(event.rank, 0):
            return None
        self._latest[event.rank] = incarnation
        self.present[event.rank] = met = Met(Rank(event.rank), incarnation, event.cards)
        return met

    def over(self, event: WorkerLeaving | WorkerLost) -> Parted | None:
        """A life's end; None where it is not the present one."""
        life = self.present.get(event.rank)
        if life is None or event.incarnation != life.incarnation:
            return None
        del self.present[event.rank]
        return Parted(life.rank, life.incarnation)
