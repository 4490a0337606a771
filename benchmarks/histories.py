"""Logs for replay benchmarks: equal to those of a deployment, made in memory by the conductor's core.

Requests overlap as under load: each is submitted while earlier ones run. Every answer has 64 tokens in four
chunks, as from a model that takes some milliseconds per step. A request has 11 events: seven of its
lifecycle, four of its output.
"""

from collections.abc import Iterable
from typing import Final

import msgspec

from conductor.core.cluster import Cluster
from conductor.core.request import Decision
from conductor.core.schedule import Deployment
from models import registry
from shared.events import (
    EpochOpened,
    Event,
    Inputs,
    NodeReady,
    OutputChunk,
    Params,
    RequestSubmitted,
    WalkCompleted,
    WalkResult,
    WorkerJoined,
    encode,
)
from shared.log.port import StoredRecord
from shared.subjects import CONDUCTOR_WRITER, Subjects, worker_writer
from shared.tensors import inline_ids
from shared.transcript import Transcript

RANK: Final = 0
UNDER_WAY: Final = 32
CHUNKS: Final = 4
TOKENS_PER_CHUNK: Final = 16
MAX_TOKENS: Final = CHUNKS * TOKENS_PER_CHUNK
QUESTION: Final = "What does sorted do? Answer in one sentence, and say what it returns."


def make(
    requests: int, deployment: Deployment, subjects: Subjects, *, chunks: int = CHUNKS
) -> list[StoredRecord]:
    """Make the log of a deployment that has answered `requests` requests with so many chunks each."""
    history = _History(deployment, subjects, chunks)
    for number in range(requests):
        history.submit(f"request-{number:06}")
        if len(history.orders) >= UNDER_WAY:
            history.answer_oldest()
    while history.orders:
        history.answer_oldest()
    return history.records


def joined(rank: int, model: str, incarnation: str = "bench") -> WorkerJoined:
    """Make a worker's first event."""
    return WorkerJoined(
        id=f"{worker_writer(rank)}.joined.{incarnation}",
        writer=worker_writer(rank),
        rank=rank,
        model=model,
        nodes=["prepare", "llm"],
        device="cpu",
        kv_tokens=1 << 20,
    )


def submission(request_id: str, model: str, *, origin: str = "bench") -> RequestSubmitted:
    """Make the submission of a client's request."""
    return RequestSubmitted(
        id=f"{request_id}.submitted",
        writer=origin,
        request_id=request_id,
        model=model,
        inputs=Inputs(messages=[{"role": "user", "content": QUESTION}]),
        params=Params(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True),
        origin=origin,
    )


def completed(order: NodeReady, number: int) -> WalkCompleted:
    """Make a worker's report of `order`, for an answer whose output was emitted elsewhere."""
    if order.walks[0].name == "prepare":
        results = [
            WalkResult(
                name="prepare",
                facts={"prompt_tokens": 24, "sampling": {"temperature": 0.0, "top_p": 1.0, "top_k": 0}},
                outputs={
                    "token_ids": inline_ids(f"{order.request_id}/1/0/prepare/token_ids", list(range(24)))
                },
            )
        ]
    else:
        facts = {"completion_tokens": MAX_TOKENS, "finish_reason": "length"}
        results = [WalkResult(name="prefill"), WalkResult(name="decode", facts=facts)]
    return WalkCompleted(
        id=f"{order.request_id}.done.{order.attempt}.{order.index}.{order.rank}",
        writer=worker_writer(order.rank),
        number=number,
        request_id=order.request_id,
        epoch=order.epoch,
        attempt=order.attempt,
        incarnation=order.incarnation,
        index=order.index,
        rank=order.rank,
        results=results,
        durations_s={walk.name: 0.01 for walk in order.walks},
    )


class _History:
    """A log, its leading conductor, and a worker with a queue of orders."""

    def __init__(self, deployment: Deployment, subjects: Subjects, chunks: int = CHUNKS) -> None:
        self.records: list[StoredRecord] = []
        self.orders: dict[str, NodeReady] = {}
        self._chunks = chunks
        self._deployment = deployment
        self._subjects = subjects
        self._cluster = Cluster(registry.graph, subjects)
        self._decided = 0
        self._reported = 0
        opened = EpochOpened(
            id="epoch.1.bench",
            writer=CONDUCTOR_WRITER,
            epoch=1,
            conductor="bench",
            core=deployment.core_digest,
        )
        self._store_fact(subjects.epoch, opened)
        self._store_fact(subjects.worker(RANK), joined(RANK, deployment.model))

    def submit(self, request_id: str) -> None:
        self._store_fact(self._subjects.request(request_id), submission(request_id, self._deployment.model))

    def answer_oldest(self) -> None:
        """Run the oldest order and at once the one that follows from it."""
        request_id = next(iter(self.orders))
        self._complete(self.orders.pop(request_id))
        answer = self.orders.pop(request_id)
        totals = self._emit(answer)
        self._complete(answer, output=totals)

    def _emit(self, order: NodeReady) -> object:
        transcript = Transcript()
        request_id = str(order.request_id)
        for index in range(self._chunks):
            self._reported += 1
            chunk = OutputChunk(
                id=f"{request_id}.out.{order.attempt}.{index}",
                writer=worker_writer(RANK),
                number=self._reported,
                request_id=request_id,
                epoch=order.epoch,
                attempt=order.attempt,
                incarnation=order.incarnation,
                index=index,
                text="returns a new sorted list from the items. ",
                text_offset=index * 42,
                token_ids=list(range(500, 500 + TOKENS_PER_CHUNK)),
                token_offset=index * TOKENS_PER_CHUNK,
            )
            transcript.fold(chunk)
            self._store_fact(self._subjects.output(order.origin, request_id, worker_writer(RANK)), chunk)
        return transcript.totals

    def _complete(self, order: NodeReady, **changes: object) -> None:
        self._reported += 1
        event = msgspec.structs.replace(completed(order, self._reported), **changes)
        self._store_fact(self._subjects.done(order.rank, str(order.request_id)), event)

    # ---- the log -----------------------------------------------------------------------------------
    def _store_fact(self, subject: str, event: Event) -> None:
        """Store a fact, let the conductor fold it, and store its decisions after it."""
        unread = [self._store(subject, event)]
        while unread:
            record = unread.pop(0)
            decisions = self._cluster.fold(record).decisions
            unread += self._publish((*decisions, *self._cluster.schedule(self._deployment)))

    def _publish(self, decisions: Iterable[Decision]) -> list[StoredRecord]:
        stored = []
        for decision in decisions:
            self._decided += 1
            event = msgspec.structs.replace(decision, writer=CONDUCTOR_WRITER, number=self._decided, epoch=1)
            request_id = str(event.request_id)
            if isinstance(event, NodeReady):
                self.orders[request_id] = event
                stored.append(self._store(self._subjects.ready(event.rank, request_id), event))
            else:
                stored.append(self._store(self._subjects.walk(request_id), event))
        return stored

    def _store(self, subject: str, event: Event) -> StoredRecord:
        seq = len(self.records) + 1
        record = StoredRecord(seq, subject, encode(event), time_ns=seq * 1_000_000)
        self.records.append(record)
        return record
