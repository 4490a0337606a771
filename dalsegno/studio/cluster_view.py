"""The cluster at a position of a log: its ranks, and the requests that are open.

The log is folded from its beginning by the conductor's own code. The last fold is kept, so that a later
position costs only the records between.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, Final

from conductor.core.cluster import Cluster
from conductor.core.request import Request
from conductor.core.retention import REPLAY
from dalsegno.history.summary import iso
from dalsegno.replay.timeline import plain
from models import registry
from shared.events import MalformedEventError, NodeReady, OutputChunk, WorkerJoined
from shared.log.port import StoredRecord
from shared.subject_rules import read_event
from shared.subjects import Subjects

_TURN: Final = 500
"""Records that are folded before others may use the event loop."""
_SHOWN: Final = 500
"""Open requests that are listed."""

Reader = Callable[[int, int], AsyncIterator[StoredRecord]]
"""Reads the records from one position to another."""


@dataclass(slots=True)
class ClusterFold:
    """A log, folded up to a position."""

    subjects: Subjects
    read: Reader
    _cluster: Cluster = field(init=False)
    _seq: int = 0
    _time_ns: int = 0
    _open: dict[str, None] = field(default_factory=dict)
    _ended: dict[str, int] = field(default_factory=dict)
    _nodes: dict[int, list[str]] = field(default_factory=dict)
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        self._restart()

    async def at(self, seq: int) -> dict[str, Any]:
        """Return the cluster after the last record up to a position, as JSON values."""
        async with self._lock:
            if seq < self._seq:
                self._restart()
            count = 0
            async for record in self.read(self._seq + 1, seq):
                self._fold(record)
                count += 1
                if count % _TURN == 0:
                    await asyncio.sleep(0)
            return self._shown()

    def _restart(self) -> None:
        self._cluster = Cluster(registry.graph, self.subjects, retention=REPLAY)
        self._seq, self._time_ns = 0, 0
        self._open, self._ended, self._nodes = {}, {}, {}

    def _fold(self, record: StoredRecord) -> None:
        self._cluster.fold(record)
        self._seq, self._time_ns = record.seq, record.time_ns
        try:
            address, event = read_event(record, self.subjects)
        except MalformedEventError:
            return
        if isinstance(event, WorkerJoined):
            self._nodes[event.rank] = list(event.nodes)
        if address.request_id is None or isinstance(event, NodeReady | OutputChunk):
            return
        request_id = str(address.request_id)
        request = self._cluster.request(request_id)
        if request is None:
            self._open.pop(request_id, None)
        elif not request.phase.ended:
            self._open[request_id] = None
        elif request_id in self._open:
            del self._open[request_id]
            self._ended[str(request.phase)] = self._ended.get(str(request.phase), 0) + 1

    def _shown(self) -> dict[str, Any]:
        requests = [one for name in self._open if (one := self._cluster.request(name)) is not None]
        return {
            "seq": self._seq,
            "time": iso(self._time_ns),
            "leader": self._cluster.leader,
            "epoch": self._cluster.fence.epoch,
            "ranks": [self._rank(rank, requests) for rank in sorted(self._cluster.world.ranks)],
            "requests": [self._request(one) for one in requests[:_SHOWN]],
            "open": len(requests),
            "ended": self._ended,
        }

    def _rank(self, rank: int, requests: list[Request]) -> dict[str, Any]:
        state = self._cluster.world.ranks[rank]
        running = [one.id for one in requests if any(rank in step.incarnations for step in one.running)]
        return {
            "rank": rank,
            "incarnation": state.incarnation,
            "kv_tokens": state.kv_tokens,
            "max_seq_len": state.max_seq_len,
            "nodes": self._nodes.get(rank, []),
            "weights": plain(state.weights),
            "placed": sum(rank in one.ranks for one in requests),
            "running": running[:_SHOWN],
        }

    def _request(self, one: Request) -> dict[str, Any]:
        return {
            "request_id": one.id,
            "phase": str(one.phase),
            "seconds": (self._time_ns - one.submitted_ns) / 1e9,
            "attempt": one.attempt,
            "tenant": one.tenant,
            "ranks": sorted(one.ranks),
            "steps": [f"{step.index}: {'+'.join(step.walks)}" for step in one.running],
        }
