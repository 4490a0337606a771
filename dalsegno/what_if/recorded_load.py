"""Recorded traffic as a simulation repeats it: arrivals, and the work of each step. Pure.

arrivals    the submissions, at their times; cancellations, at their distance from the submission
parts       what a rank reported of a step: the results that plans branch on, and the work of its nodes
hops        the time from a record to each decision that followed from it
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import median
from typing import Final
from zlib import crc32

from conductor.core.cluster import Cluster
from dalsegno.gate.recorded_decisions import Fold, RecordedDecisions
from dalsegno.what_if.cost_model import Sample
from models.base import EngineKind, ModelGraph
from models.sequence_request import runs_token_program
from shared.errors import TensorGone
from shared.events import (
    NodeReady,
    NodeWork,
    RequestAdmitted,
    RequestCancel,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestRejected,
    RequestSubmitted,
    WalkCompleted,
    WorkerJoined,
    WorkerLost,
)
from shared.log.port import StoredRecord
from shared.subjects import CONDUCTOR_WRITER, Subjects
from shared.tensors import read_ids

_END_HOP_S: Final = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A rank's report of a step.

    Attributes:
        after_s: from the submission to the order.
        took_s: from the order to the report.
        sequences: by node, the prompt and the number of tokens of the sequence that its engine computed.
        others: by node, how long its calls took, waits left out.
    """

    order: NodeReady
    done: WalkCompleted
    after_s: float
    took_s: float
    sequences: Mapping[str, "Tokens"]
    others: Mapping[str, float]

    @property
    def overhead_s(self) -> float:
        """The part of its time that none of its nodes took."""
        took = [work.took_s for work in self.done.work.values()]
        # Nodes of concurrent walks, or of a chain: what fits into the time is a chain.
        rest = self.took_s - sum(took)
        return rest if rest >= 0 else max(0.0, self.took_s - max(took, default=0.0))

    @property
    def is_chain(self) -> bool:
        """True if its nodes ran one after the other."""
        return sum(work.took_s for work in self.done.work.values()) <= self.took_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """The tokens of a sequence.

    Attributes:
        prompt: their ids.
        generated: how many were generated.
        drafted: how many of these were accepted drafts, which took no step of their own.
    """

    prompt: Sequence[int]
    generated: int
    drafted: int = 0

    @property
    def steps(self) -> int:
        """The number of steps that generated them."""
        return max(min(1, self.generated), self.generated - self.drafted)


@dataclass(slots=True, kw_only=True)
class Asked:
    """A recorded request.

    Attributes:
        at_ns: the time of its submission; `end_ns` that of its end.
        cancel_after_s: when its client cancelled it, after the submission; None if it did not.
        tokens: the tokens of its answer, by `usage`.
        parts: by step and rank.
        hops: by decision, the time from its cause to its record.
    """

    record: StoredRecord
    event: RequestSubmitted
    at_ns: int
    end_ns: int = 0
    outcome: str = "open"
    config: str = ""
    cancel_after_s: float | None = None
    tokens: int = 0
    parts: dict[int, dict[int, Part]] = field(default_factory=dict)
    hops: dict[str, float] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return str(self.event.request_id)

    @property
    def took_s(self) -> float:
        """The time from the submission to the end."""
        return (self.end_ns - self.at_ns) / 1e9

    @property
    def first_s(self) -> float | None:
        """The time from the submission to the first token in an engine; None without one."""
        found = [
            part.after_s + first_s
            for parts in self.parts.values()
            for part in parts.values()
            for node in part.sequences
            if (first_s := part.done.work[node].first_token_s)
        ]
        return min(found, default=None)


@dataclass(slots=True, kw_only=True)
class Load:
    """The recorded traffic.

    Attributes:
        requests: in order of submission.
        joins: by rank, how its last incarnation joined.
        adapters: records about LoRA adapters.
        losses: how many workers were lost.
        samples: by node, the work of sequences.
        lanes: by rank and node, how many calls of a node that is no engine's ran at once.
        has_work: whether any step reports its work.
    """

    requests: list[Asked] = field(default_factory=list)
    joins: dict[int, WorkerJoined] = field(default_factory=dict)
    adapters: list[StoredRecord] = field(default_factory=list)
    losses: int = 0
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    lanes: dict[tuple[int, str], int] = field(default_factory=dict)
    has_work: bool = False

    @property
    def hop_s(self) -> float:
        """The usual time from a record to a decision that follows from it."""
        hops = [hop for one in self.requests for hop in one.hops.values()]
        return median(hops) if hops else _END_HOP_S


def read(
    records: Iterable[StoredRecord],
    recorded: RecordedDecisions,
    *,
    subjects: Subjects,
    graph_of: Callable[[str], ModelGraph],
) -> Load:
    """Read the traffic of a log from its beginning.

    Args:
        records: all of them, outputs included.
        recorded: its decisions of scheduling.
        subjects: those of the log.
        graph_of: the graph of a family, by name.
    """
    reader = _Reader(subjects, graph_of, recorded)
    for record in records:
        reader.take(record)
    return reader.close()


class _Reader:
    def __init__(
        self, subjects: Subjects, graph_of: Callable[[str], ModelGraph], recorded: RecordedDecisions
    ) -> None:
        self._subjects = subjects
        self._graph_of = graph_of
        self._fold = Fold(Cluster(graph_of, subjects))
        self._found: dict[str, Asked] = {}
        self._load = Load()
        self._causes: dict[str, int] = {}
        self._times: dict[int, int] = {}
        self._windows = {
            made.event.id: made.earliest for e in recorded.epochs.values() for made in e.made.values()
        }
        self._orders: dict[tuple[str, int, int, int], tuple[NodeReady, int]] = {}
        self._families: dict[str, str] = {}
        self._busy: dict[tuple[int, str], list[tuple[float, float]]] = {}
        self._ran: dict[tuple[int, str], list[_Ran]] = {}

    def take(self, record: StoredRecord) -> None:
        """Fold one record."""
        address = self._subjects.parse(record.subject)
        if address is None or address.kind == "edge":
            return
        if address.kind == "output" and address.writer != CONDUCTOR_WRITER:
            return
        self._times[record.seq] = record.time_ns
        if address.kind == "adapter":
            self._load.adapters.append(record)
        event, decisions, _ = self._fold.read(record)
        for decision in decisions:
            self._causes.setdefault(decision.id, record.time_ns)
        if event is None:
            return
        if isinstance(event, WorkerJoined):
            self._load.joins[event.rank] = event
        elif isinstance(event, WorkerLost):
            self._load.losses += 1
        elif isinstance(event, RequestSubmitted):
            request_id = str(event.request_id)
            if request_id not in self._found:
                self._found[request_id] = Asked(record=record, event=event, at_ns=record.time_ns)
        elif (asked := self._found.get(str(event.request_id))) is not None:
            self._of_request(asked, event, record)

    def _of_request(self, asked: Asked, event: object, record: StoredRecord) -> None:
        match event:
            case RequestAdmitted():
                self._families[asked.id] = event.family
                asked.config = event.pins.config
                began = max(self._windows.get(event.id, 0), asked.record.seq)
                since_ns = self._times.get(began, asked.at_ns)
                asked.hops.setdefault(event.id, (record.time_ns - since_ns) / 1e9)
            case NodeReady():
                self._orders[asked.id, event.attempt, event.index, event.rank] = (event, record.time_ns)
                self._hop(asked, event.id, record)
            case WalkCompleted():
                self._completed(asked, event, record)
            case RequestCancel():
                if asked.cancel_after_s is None:
                    asked.cancel_after_s = (record.time_ns - asked.at_ns) / 1e9
            case RequestFinished() | RequestFailed() | RequestCancelled() | RequestRejected() if (
                not asked.end_ns
            ):
                asked.end_ns = record.time_ns
                asked.outcome = type(event).__name__.removeprefix("Request").lower()
                if isinstance(event, RequestFinished):
                    asked.tokens = event.usage.completion_tokens
                self._hop(asked, event.id, record)
            case _:
                pass

    def _hop(self, asked: Asked, decision: str, record: StoredRecord) -> None:
        cause_ns = self._causes.get(decision)
        if cause_ns is not None:
            asked.hops.setdefault(decision, (record.time_ns - cause_ns) / 1e9)

    def _completed(self, asked: Asked, done: WalkCompleted, record: StoredRecord) -> None:
        known = self._orders.get((asked.id, done.attempt, done.index, done.rank))
        family = self._families.get(asked.id)
        if known is None or family is None:
            return
        order, ordered_ns = known
        graph = self._graph_of(family)
        sequences: dict[str, Tokens] = {}
        others: dict[str, float] = {}
        in_engine = [
            node
            for node, work in done.work.items()
            if graph.nodes.get(node) is EngineKind.KV
            and work.steps
            and not any(map(runs_token_program, order.walks))
        ]
        self._load.has_work |= bool(done.work)
        for node, work in done.work.items():
            if node in in_engine:
                sequences[node] = _tokens_of(order, done, work, is_alone=len(in_engine) == 1)
                self._ran.setdefault((done.rank, node), []).append(
                    _Ran(
                        work=work,
                        tokens=sequences[node],
                        queued_s=ordered_ns / 1e9,
                        end_s=record.time_ns / 1e9,
                    )
                )
                continue
            others[node] = max(0.0, work.took_s - work.waited_s)
            end_s = record.time_ns / 1e9
            self._busy.setdefault((done.rank, node), []).append((end_s - others[node], end_s))
        asked.parts.setdefault(done.index, {})[done.rank] = Part(
            order=order,
            done=done,
            after_s=(ordered_ns - asked.at_ns) / 1e9,
            took_s=(record.time_ns - ordered_ns) / 1e9,
            sequences=sequences,
            others=others,
        )

    def close(self) -> Load:
        self._load.requests = sorted(self._found.values(), key=lambda one: one.record.seq)
        self._load.lanes = {key: _most_at_once(times) for key, times in self._busy.items()}
        for (_, node), ran in self._ran.items():
            self._load.samples.setdefault(node, []).extend(_samples(ran))
        return self._load


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ran:
    """A sequence on one engine, by the log's clock."""

    work: NodeWork
    tokens: Tokens
    queued_s: float
    end_s: float

    @property
    def first_token_s(self) -> float:
        """When it had its first token, or ended without any."""
        return self.queued_s + self.work.first_token_s if self.work.first_token_s else self.end_s

    @property
    def prefill_tokens(self) -> int:
        return max(0, len(self.tokens.prompt) - self.work.cached_tokens)


def _samples(ran: Sequence[_Ran]) -> Iterator[Sample]:
    """The samples of one engine's sequences.

    The work of a sequence names the prompts beside it, but not when they were computed. That is taken to be
    at the first tokens of these.
    """
    by_time = sorted(ran, key=lambda one: one.first_token_s)
    times = [one.first_token_s for one in by_time]
    sums = [0, *accumulate(one.prefill_tokens for one in by_time)]
    for one in ran:
        work, steps = one.work, one.tokens.steps - 1
        took_s = work.took_s - work.first_token_s - work.held_s
        if steps < 1 or took_s <= 0 or work.preemption_count or not work.first_token_s:
            continue
        end_s = one.first_token_s + took_s
        yield Sample(
            took_s=took_s,
            steps=steps,
            rows=max(work.rows, 1.0),
            prefill_tokens=sums[bisect_right(times, end_s)] - sums[bisect_right(times, one.first_token_s)],
            begin_s=one.first_token_s,
            end_s=end_s,
        )


def _tokens_of(order: NodeReady, done: WalkCompleted, work: NodeWork, *, is_alone: bool) -> Tokens:
    """The tokens of a node's sequence; of several nodes, only their steps are known."""
    if not is_alone:
        return Tokens(prompt=_unlike(done.id, 1), generated=work.steps)
    facts = [one.facts for one in done.results]
    generated = sum(int(one.get("completion_tokens", 0)) for one in facts)
    is_sampled = any("sampling" in walk.args for walk in order.walks)
    if not generated:
        return Tokens(prompt=_prompt(order, done.id), generated=work.steps if is_sampled else 0)
    return Tokens(prompt=_prompt(order, done.id), generated=generated, drafted=work.accepted)


def _prompt(order: NodeReady, name: str) -> Sequence[int]:
    for walk in order.walks:
        for handle in walk.inputs.values():
            if handle.dtype == "int32" and len(handle.shape) == 1 and handle.shape[0]:
                try:
                    return read_ids(handle)
                except TensorGone:
                    return _unlike(name, handle.shape[0])
    return _unlike(name, 1)


def _unlike(name: str, length: int) -> Sequence[int]:
    """Token ids that no other prompt has: what is not known is not taken to be cached."""
    first = -1 - crc32(name.encode()) * 1_000_000
    return range(first, first - length, -1)


def _most_at_once(times: Sequence[tuple[float, float]]) -> int:
    """The most intervals that overlap."""
    changes = sorted(
        [(begin, 1) for begin, end in times if end > begin]
        + [(end, -1) for begin, end in times if end > begin]
    )
    most = now = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return max(most, 1)
