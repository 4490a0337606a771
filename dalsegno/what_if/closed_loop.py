"""A closed loop of the real deciding core and simulated ranks: recorded requests under a deployment. Pure.

    submission ──> Cluster.fold, Cluster.schedule ──hop──> order ──> rank (`ranks`) ──> report ──> fold

The core is the conductor's own (`conductor.core`), with its admissions, plans and limits of time. What is
simulated: time, the ranks, and the delay of each decision, which is the recorded one of the same decision.
No rank fails. Requests come when they came, whatever becomes of those before them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from conductor import writer
from conductor.core.cluster import Cluster
from conductor.core.react import deadlines
from conductor.core.request import Decision
from conductor.core.schedule import Deployment
from dalsegno.what_if.cost_model import StepCost
from dalsegno.what_if.engines import EngineSize, SimulatedEngine, SimulatedNode
from dalsegno.what_if.ranks import SimulatedRank
from dalsegno.what_if.recorded_load import Asked, Load, Part
from dalsegno.what_if.timeline import Timeline
from models.base import ModelGraph
from shared.errors import ClientError
from shared.events import (
    DeadlinePassed,
    EpochOpened,
    Event,
    NodeReady,
    RequestCancel,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestRejected,
    WalkCompleted,
    WalkResult,
    WalkStop,
    WorkerJoined,
    encode,
)
from shared.log.port import StoredRecord
from shared.subjects import CONDUCTOR_WRITER, Subjects, worker_writer

_ENDS = (RequestFinished, RequestFailed, RequestCancelled, RequestRejected)
_BEGIN_NS = 1_000_000_000_000
_LEAD_S = 1.0
"""Time from the beginning to the first submission: the ranks are there before."""


class UnknownWorkError(ClientError):
    """A step whose work the recording does not have."""

    code = "unknown_work"


@dataclass(slots=True, kw_only=True)
class Served:
    """A simulated request. Times are seconds; `outcome` is `open` if it did not end."""

    at_s: float
    first_s: float | None = None
    end_s: float | None = None
    outcome: str = "open"
    tokens: int = 0

    @property
    def took_s(self) -> float | None:
        return None if self.end_s is None else self.end_s - self.at_s


@dataclass(slots=True, kw_only=True)
class Simulated:
    """The result: each request, and what the engines did.

    Attributes:
        lent: requests whose work the recording does not have, with the request whose work they were given.
        steps, rows: the engines' steps, and the sum of their rows.
    """

    requests: dict[str, Served] = field(default_factory=dict)
    lent: dict[str, str] = field(default_factory=dict)
    steps: int = 0
    rows: int = 0
    preemptions: int = 0


class ClosedLoop:
    """One simulation.

    Args:
        load: the recorded traffic.
        asked: the requests of it that are repeated.
        deployment: the one that decides.
        size: the sizes of a rank's engine, by rank.
        costs: of an engine's step, by node.
        subjects: those of the log.
        graph_of: the graph of a family, by name.
        seed: of the noise of steps.
    """

    def __init__(
        self,
        load: Load,
        asked: Sequence[Asked],
        deployment: Deployment,
        *,
        size: Callable[[int], EngineSize],
        costs: Mapping[str, StepCost],
        subjects: Subjects,
        graph_of: Callable[[str], ModelGraph],
        seed: int = 0,
    ) -> None:
        self.result = Simulated()
        self._load = load
        self._asked = {one.id: one for one in asked}
        self._deployment = deployment
        self._costs = costs
        self._size = size
        self._subjects = subjects
        self._timeline = Timeline()
        self._cluster = Cluster(graph_of, subjects)
        self._seq = 0
        self._number = 0
        self._last_ns = 0
        self._hop_s = load.hop_s
        self._seed = seed
        self._begin_s = 0.0
        self._ranks: dict[int, SimulatedRank] = {}
        self._timers: set[tuple[str, int | None, int]] = set()
        self._donors = [one for one in asked if one.outcome == "finished"]

    def run(self) -> Simulated:
        """Repeat the requests until all have ended, or wait for something that never comes.

        Raises:
            UnknownWorkError: the recording does not have the work of a step.
        """
        begin_ns = min((one.at_ns for one in self._asked.values()), default=0)
        self._begin_s = begin_ns / 1e9 - _LEAD_S
        self._begin()
        for one in self._asked.values():
            at_s = _LEAD_S + (one.at_ns - begin_ns) / 1e9
            self.result.requests[one.id] = Served(at_s=at_s)
            self._timeline.at(at_s, partial(self._submit, one))
            if one.cancel_after_s is not None:
                cancel = RequestCancel(request_id=one.id, reason="as recorded")
                subject = self._subjects.control(one.id)
                self._timeline.at(at_s + one.cancel_after_s, partial(self._store_event, subject, cancel))
        self._timeline.run()
        for rank in self._ranks.values():
            for engine in rank.engines.values():
                self.result.steps += engine.steps
                self.result.rows += engine.rows
                self.result.preemptions += engine.preemptions
        return self.result

    # ---- the beginning -------------------------------------------------------------------------------
    def _begin(self) -> None:
        opened = EpochOpened(
            id="epoch.1.what-if",
            writer=CONDUCTOR_WRITER,
            epoch=1,
            conductor="what-if",
            core=self._deployment.core_digest,
        )
        self._store_event(self._subjects.epoch, opened)
        for group in self._deployment.groups:
            for rank in group.ranks:
                if rank not in self._ranks:
                    self._join(int(rank), [int(one) for one in group.ranks])
        for record in self._load.adapters:
            self._store(record.subject, record.data)

    def _join(self, rank: int, group: Sequence[int]) -> None:
        joins = self._load.joins
        like = next((one for one in (rank, *group) if one in joins), None)
        size = self._size(rank if like is None else like)
        event = WorkerJoined(
            id=f"w{rank}.what-if",
            writer=worker_writer(rank),
            rank=rank,
            model=self._deployment.model,
            nodes=sorted(
                {node for one in self._deployment.groups if rank in one.ranks for node in one.nodes}
            ),
            device=size.device,
            kv_tokens=size.kv_tokens,
            max_seq_len=size.max_positions,
            node_weights=joins[like].node_weights if like is not None else {},
        )
        self._ranks[rank] = SimulatedRank(
            {
                node: SimulatedEngine(self._timeline, size, cost, begin_s=self._begin_s, seed=self._seed)
                for node, cost in self._costs.items()
            },
            node_of=lambda node: SimulatedNode(self._timeline, self._load.lanes.get((like or rank, node), 1)),
            pause=self._timeline.after,
            report=self._report,
            on_first=self._first,
        )
        self._store_event(self._subjects.worker(rank), event)

    # ---- the log -------------------------------------------------------------------------------------
    def _submit(self, one: Asked) -> None:
        self._store(one.record.subject, one.record.data)
        self._set_timers(one.id)

    def _store_event(self, subject: str, event: Event) -> None:
        self._store(subject, encode(event))

    def _store(self, subject: str, data: bytes) -> None:
        """Store a record, fold it, and send what follows, each decision after its hop."""
        self._seq += 1
        self._last_ns = max(self._last_ns + 1, _BEGIN_NS + round(self._timeline.now_s * 1e9))
        folded = self._cluster.fold(StoredRecord(self._seq, subject, data, self._last_ns))
        self._decide(folded.decisions)
        if self._cluster.fence.epoch:
            self._decide(self._cluster.schedule(self._deployment))

    def _decide(self, decisions: Iterable[Decision]) -> None:
        for decision in decisions:
            asked = self._asked.get(str(decision.request_id))
            hop_s = self._hop_s if asked is None else asked.hops.get(decision.id, self._hop_s)
            self._timeline.after(hop_s, partial(self._publish, decision))

    def _publish(self, decision: Decision) -> None:
        self._number += 1
        stamped = msgspec.structs.replace(
            decision, writer=CONDUCTOR_WRITER, number=self._number, epoch=self._cluster.fence.epoch
        )
        request_id = str(decision.request_id)
        self._store_event(writer.subject_of(decision, self._subjects, self._origin), stamped)
        if isinstance(decision, NodeReady):
            self._ranks[decision.rank].take(decision, self._part_of(decision))
            self._set_timers(request_id)
        elif isinstance(decision, WalkStop):
            self._ranks[decision.rank].stop(request_id, decision.attempt, decision.index)
        elif isinstance(decision, _ENDS):
            self._ended(request_id, decision)

    def _origin(self, request_id: str) -> str:
        request = self._cluster.request(request_id)
        return request.submission.origin if request is not None else "nats"

    def _ended(self, request_id: str, decision: Decision) -> None:
        served = self.result.requests.get(request_id)
        if served is None or served.end_s is not None:
            return
        served.end_s = self._timeline.now_s
        served.outcome = type(decision).__name__.removeprefix("Request").lower()
        if isinstance(decision, RequestFinished):
            served.tokens = decision.usage.completion_tokens

    # ---- time limits ---------------------------------------------------------------------------------
    def _set_timers(self, request_id: str) -> None:
        request = self._cluster.open.get(request_id)
        for one in deadlines(request) if request is not None else ():
            key = (one.request_id, one.step, one.at_ns)
            if key not in self._timers:
                self._timers.add(key)
                self._timeline.at(
                    (one.at_ns - _BEGIN_NS) / 1e9, partial(self._pass, request_id, one.step, one.at_ns)
                )

    def _pass(self, request_id: str, step: int | None, at_ns: int) -> None:
        """A time limit has passed, if there still is one."""
        request = self._cluster.open.get(request_id)
        if request is None or not any((one.step, one.at_ns) == (step, at_ns) for one in deadlines(request)):
            return
        event = DeadlinePassed(
            id=f"{request_id}.deadline.{step}.{at_ns}",
            writer=CONDUCTOR_WRITER,
            epoch=self._cluster.fence.epoch,
            request_id=request_id,
            attempt=request.attempt,
            deadline_ns=at_ns,
            step=step,
        )
        self._store_event(self._subjects.walk(request_id), event)

    # ---- the ranks -----------------------------------------------------------------------------------
    def _part_of(self, order: NodeReady) -> Part:
        request_id = str(order.request_id)
        found = self._recorded(self._asked[request_id], order)
        if found is not None:
            return found
        own = self._asked[request_id].record.seq
        for donor in sorted(self._donors, key=lambda one: abs(one.record.seq - own)):
            if (found := self._recorded(donor, order)) is not None:
                self.result.lent[request_id] = donor.id
                return found
        walks = " then ".join(walk.name for walk in order.walks)
        raise UnknownWorkError(
            f"{request_id}: the recording does not have the work of step {order.index} ({walks}) on rank "
            f"{order.rank}, nor that of another request's"
        )

    def _recorded(self, asked: Asked, order: NodeReady) -> Part | None:
        """The recorded part of a step on this rank, or on another one of its group."""
        parts = asked.parts.get(order.index, {})
        mates = [
            int(r) for group in self._deployment.groups if order.rank in group.ranks for r in group.ranks
        ]
        names = [walk.name for walk in order.walks]
        for rank in (order.rank, *mates, *(parts if len(parts) == 1 else ())):
            part = parts.get(rank)
            if part is not None and [walk.name for walk in part.order.walks] == names:
                return part
        return None

    def _first(self, request_id: str) -> None:
        served = self.result.requests[request_id]
        if served.first_s is None:
            served.first_s = self._timeline.now_s - served.at_s

    def _report(self, order: NodeReady, part: Part) -> None:
        done = WalkCompleted(
            id=f"{order.id}.done",
            writer=worker_writer(order.rank),
            request_id=order.request_id,
            attempt=order.attempt,
            incarnation=order.incarnation,
            index=order.index,
            rank=order.rank,
            results=[_as_ordered(one, order) for one in part.done.results],
            output=part.done.output,
            tracks=part.done.tracks,
            streams=part.done.streams,
        )
        self._store_event(self._subjects.done(order.rank, str(order.request_id)), done)


def _as_ordered(result: WalkResult, order: NodeReady) -> WalkResult:
    """The recorded result of a walk, of an answer that is not longer than the order allows."""
    limits = [int(walk.args["max_tokens"]) for walk in order.walks if walk.args.get("max_tokens")]
    recorded = result.facts.get("completion_tokens")
    if not limits or not isinstance(recorded, int) or recorded <= min(limits):
        return result
    facts = result.facts | {"completion_tokens": min(limits), "finish_reason": "length"}
    return msgspec.structs.replace(result, facts=facts)
