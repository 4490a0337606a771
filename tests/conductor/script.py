"""A small vocabulary to write the conductor's histories with: a log in memory, and one conductor on it.

`Script.say(subject, event)` stores a fact and lets the conductor react; what it decides is stored behind
it, as a leading conductor would. `records` is the log.
"""

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from conductor import writer
from conductor.core.cluster import Cluster, Folded
from conductor.core.request import Decision, Request
from conductor.core.schedule import Deployment
from configs.placement import PlacedGroup
from models import registry
from models.base import ModelGraph
from shared.events import (
    EpochOpened,
    Event,
    Inputs,
    Limits,
    MalformedEventError,
    NodeReady,
    Params,
    RequestCancel,
    RequestSubmitted,
    WalkBegun,
    WalkCompleted,
    WalkFailed,
    WalkProgressed,
    WalkResult,
    WorkerJoined,
    WorkerLeaving,
    WorkerLost,
    decode,
    encode,
)
from shared.ids import Rank
from shared.log.port import StoredRecord
from shared.subjects import CONDUCTOR_WRITER, Subjects
from shared.tensors import inline_ids

SUBJECTS = Subjects("ds")
LIMITS = Limits(max_seq_len=128, kv_tokens=128, default_max_tokens=16, max_attempts=3)


def deployment(**changes: Any) -> Deployment:
    base = Deployment(
        model="demo",
        family="decoder_lm",
        groups=(PlacedGroup(nodes=("prepare", "llm"), walks=None, ranks=(Rank(0),)),),
        kv_nodes=frozenset({"llm"}),
        limits=LIMITS,
        max_concurrent_requests=8,
        graph_digest="g",
        plan_digest="p",
        config_digest="c",
        core_digest="k",
    )
    return msgspec.structs.replace(base, **changes)


def subject_of(decision: Decision, origin: str = "nats") -> str:
    return writer.subject_of(decision, SUBJECTS, lambda _: origin)


class Script:
    """A log, and a conductor that leads on it (or does not: `lead=False`)."""

    def __init__(
        self,
        *,
        lead: bool = True,
        serve: Deployment | None = None,
        graph_of: Callable[[str], ModelGraph] = registry.graph,
    ) -> None:
        self.records: list[StoredRecord] = []
        self.cluster = Cluster(graph_of, SUBJECTS)
        self.deployment = serve or deployment()
        self.lead = lead
        self.folded: list[Folded] = []
        self.begins = True
        """Whether workers say that they begin what is on probation, as soon as it is ordered."""
        self._read = 0
        self._number = 0

    # ---- telling -----------------------------------------------------------------------------------
    def store(self, subject: str, data: bytes) -> int:
        seq = len(self.records) + 1
        self.records.append(StoredRecord(seq, subject, data, time_ns=seq * 1_000_000))
        return seq

    def say(self, subject: str, event: Event | bytes) -> int:
        """Store one event and let the conductor read to the end of the log; the event's sequence."""
        seq = self.store(subject, event if isinstance(event, bytes) else encode(event))
        self.settle()
        return seq

    def settle(self) -> None:
        while self._read < len(self.records):
            folded = self.cluster.fold(self.records[self._read])
            self.folded.append(folded)
            self._read += 1
            if self.lead:
                self.publish(folded.decisions)
                self.publish(self.cluster.schedule(self.deployment))
            if self.begins:
                self._begin(self.records[self._read - 1])

    def _begin(self, record: StoredRecord) -> None:
        address = SUBJECTS.parse(record.subject)
        if address is None or address.kind != "ready" or not record.data:
            return
        with contextlib.suppress(MalformedEventError):
            ready = decode(record.data)
            if (
                isinstance(ready, NodeReady)
                and ready.on_probation
                and self.cluster.world.incarnation(ready.rank) == ready.incarnation
            ):
                begun = WalkBegun(id=f"{ready.id}.begun", **_answering(ready))
                self.store(SUBJECTS.done(ready.rank, str(ready.request_id)), encode(begun))

    def publish(self, decisions: Iterable[Decision]) -> None:
        for decision in decisions:
            self._number += 1
            stamped = msgspec.structs.replace(
                decision, writer=CONDUCTOR_WRITER, number=self._number, epoch=self.cluster.fence.epoch
            )
            request = self.cluster.request(str(decision.request_id))
            origin = request.submission.origin if request else "nats"
            self.store(subject_of(decision, origin), encode(stamped))

    # ---- the usual beginnings ----------------------------------------------------------------------
    def open_epoch(self, epoch: int = 1, name: str = "c1") -> int:
        event = EpochOpened(
            id=f"epoch.{epoch}.{name}", writer=CONDUCTOR_WRITER, epoch=epoch, conductor=name, core="k"
        )
        return self.say(SUBJECTS.epoch, event)

    def join(
        self,
        life: str = "w0-a",
        rank: int = 0,
        kv_tokens: int = 128,
        weights: dict[str, str] | None = None,
    ) -> int:
        event = WorkerJoined(
            id=life,
            writer=f"w{rank}",
            rank=rank,
            model="demo",
            nodes=["prepare", "llm"],
            device="cpu",
            kv_tokens=kv_tokens,
            node_weights=weights or {},
        )
        return self.say(SUBJECTS.worker(rank), event)

    def leave(self, rank: int) -> int:
        life = self.cluster.world.incarnation(rank)
        event = WorkerLeaving(id=f"w{rank}.bye.{life}", writer=f"w{rank}", rank=rank, incarnation=life)
        return self.say(SUBJECTS.worker(rank), event)

    def lose(
        self, rank: int, life: int | None = None, reason: str = "silent", read_seq: int | None = None
    ) -> int:
        """The conductor's shell declares a life over: the present one, where none is named."""
        life = self.cluster.world.incarnation(rank) if life is None else life
        event = WorkerLost(
            id=f"w{rank}.lost.{life}",
            writer=CONDUCTOR_WRITER,
            epoch=self.cluster.fence.epoch,
            rank=rank,
            incarnation=life,
            reason=reason,
            read_seq=read_seq,
        )
        return self.say(SUBJECTS.lost, event)

    def submit(self, request_id: str = "r1", **fields: Any) -> int:
        usual: dict[str, Any] = {
            "model": "demo",
            "inputs": Inputs(text="hi"),
            "params": Params(max_tokens=4),
        }
        fields = usual | fields
        event = RequestSubmitted(id=f"{request_id}.submitted", request_id=request_id, **fields)
        return self.say(SUBJECTS.request(request_id), event)

    def cancel(self, request_id: str = "r1", reason: str = "client left") -> int:
        return self.say(SUBJECTS.control(request_id), RequestCancel(request_id=request_id, reason=reason))

    # ---- a worker's answers ------------------------------------------------------------------------
    def complete(self, ready: NodeReady, **changes: Any) -> int:
        event = completion(ready)
        return self.say(
            SUBJECTS.done(ready.rank, str(ready.request_id)), msgspec.structs.replace(event, **changes)
        )

    def progress(self, ready: NodeReady, **changes: Any) -> int:
        """A step on probation is further than it was."""
        event = WalkProgressed(id=f"{ready.id}.progressed", **_answering(ready))
        event = msgspec.structs.replace(event, **changes)
        return self.say(SUBJECTS.done(ready.rank, str(ready.request_id)), event)

    def fail(self, ready: NodeReady, failure: Any, gone: str | None = None, **where: Any) -> int:
        event = WalkFailed(
            id=f"{ready.id}.failed",
            **_answering(ready),
            failure=failure,
            gone=gone,
            **where,
        )
        return self.say(SUBJECTS.done(ready.rank, str(ready.request_id)), event)

    def run_to_the_end(self, request_id: str = "r1") -> None:
        """Answer every order of one request as a worker would."""
        while (ready := self.last(NodeReady, request_id)) is not None:
            self.complete(ready)
            if self.last(NodeReady, request_id) == ready:
                return

    # ---- asking ------------------------------------------------------------------------------------
    def request(self, request_id: str = "r1") -> Request:
        request = self.cluster.request(request_id)
        assert request is not None
        return request

    def events(self, kind: type[Event] | None = None, request_id: str | None = None) -> list[Any]:
        found = []
        for record in self.records:
            address = SUBJECTS.parse(record.subject)
            try:
                event = decode(record.data, address.kind if address else None)
            except MalformedEventError:
                continue
            if (kind is None or isinstance(event, kind)) and request_id in (None, event.request_id):
                found.append(event)
        return found

    def last(self, kind: type[Event], request_id: str = "r1") -> Any:
        return (self.events(kind, request_id) or [None])[-1]

    def kinds(self, request_id: str = "r1") -> list[str]:
        return [type(event).__name__ for event in self.events(request_id=request_id)]


def _answering(ready: NodeReady) -> dict[str, Any]:
    """What a worker's answer to an order says of it."""
    return {
        "writer": f"w{ready.rank}",
        "request_id": ready.request_id,
        "attempt": ready.attempt,
        "incarnation": ready.incarnation,
        "index": ready.index,
        "rank": ready.rank,
    }


def completion(ready: NodeReady) -> WalkCompleted:
    """What a healthy worker reports for `ready`."""
    names = [walk.name for walk in ready.walks]
    if names == ["prepare"]:
        results = [
            WalkResult(
                name="prepare",
                facts={"prompt_tokens": 3, "sampling": {"temperature": 0.0, "top_p": 1.0, "top_k": 0}},
                outputs={"token_ids": inline_ids(f"{ready.request_id}/token_ids", [1, 2, 3])},
            )
        ]
    else:
        facts = {"completion_tokens": 4, "finish_reason": "length"}
        results = [WalkResult(name="prefill"), WalkResult(name="decode", facts=facts)]
    return WalkCompleted(id=f"{ready.id}.done", **_answering(ready), results=results)
