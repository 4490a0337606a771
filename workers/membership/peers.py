"""The current incarnation of each rank: which other workers exist, and how their tensors are reached.

A pure fold of `worker.joined`, `worker.leaving` and `worker.lost`, in log order. An incarnation is identified
by the id of its `worker.joined`. A second copy of that event starts no second incarnation. A rank repeats the
event because the log expires records; the repeated event names the incarnation it belongs to.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from shared.events import WorkerJoined, WorkerLeaving, WorkerLost
from shared.ids import Rank


@dataclass(frozen=True, slots=True)
class PeerJoined:
    """A rank's new incarnation has started; `endpoints` says, by transport, how its tensors are reached."""

    rank: int
    incarnation: int
    endpoints: Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class PeerLeft:
    """A rank's incarnation has ended."""

    rank: int
    incarnation: int


PeerChange: TypeAlias = PeerJoined | PeerLeft


@dataclass(slots=True)
class PeerIncarnations:
    """The incarnations of all ranks so far.

    Attributes:
        known: the ids of all `worker.joined` events read.
        current: by rank, the incarnation that has not ended.
    """

    known: set[str] = field(default_factory=set)
    current: dict[int, PeerJoined] = field(default_factory=dict)
    _latest: dict[int, int] = field(default_factory=dict)

    def joined(self, event: WorkerJoined, seq: int) -> PeerJoined | None:
        """Fold a `worker.joined` stored at `seq`; None for a copy, and for one older than the latest."""
        incarnation = event.incarnation or seq
        if event.id in self.known:
            return None
        self.known.add(event.id)
        if incarnation <= self._latest.get(event.rank, 0):
            return None
        self._latest[event.rank] = incarnation
        self.current[event.rank] = peer = PeerJoined(Rank(event.rank), incarnation, event.cards)
        return peer

    def is_current(self, rank: int, incarnation: int | None) -> bool:
        """Tell whether a rank has joined as this incarnation, which has not ended."""
        peer = self.current.get(rank)
        return peer is not None and peer.incarnation == incarnation

    def ended(self, event: WorkerLeaving | WorkerLost) -> PeerLeft | None:
        """Fold the end of an incarnation; None where it is not the current one."""
        peer = self.current.get(event.rank)
        if peer is None or event.incarnation != peer.incarnation:
            return None
        del self.current[event.rank]
        return PeerLeft(peer.rank, peer.incarnation)
