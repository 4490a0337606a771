"""Control replay: repeat all decisions from the recorded facts, and compare them with the recorded ones.

Pure: it reads records and writes nothing. It runs the conductor's own fold, so it proves that this code
decides what the log says was decided. Decisions of `schedule` (admissions, rejections) depend on all
requests and are taken as facts; everything that follows from them is decided again.

In addition it checks the integrity of the log: each event of a conductor belongs to an opened epoch; each
track of an output equals the report of its worker (`shared.request_output`); each stream has as many chunks
as its policy cuts from its items (`shared.walks.chunks`), or, if its consumer left early, the items of its
chunks. Edges, which workers send one another, are read and ignored: no decision depends on them.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from conductor.core import weights
from conductor.core.cluster import Cluster, Folded
from conductor.core.lifecycle import Phase
from conductor.core.react import is_of_a_step
from conductor.core.request import Request
from conductor.core.retention import REPLAY
from models.base import ModelGraph
from shared.events import (
    AnyEvent,
    Event,
    OutputChunk,
    OutputTotals,
    Pins,
    RequestAdmitted,
    RequestFinished,
    RequestRejected,
    RequestResumed,
    RequestSubmitted,
    StreamTotals,
    WalkCompleted,
    is_answer_of_server,
)
from shared.log.port import StoredRecord
from shared.request_output import RequestOutput
from shared.subjects import CONDUCTOR_WRITER, Address, Subjects, worker_writer
from shared.transcript import Transcript
from shared.walks import ChunkPolicy, StreamLink, chunks_of, possible_policies

_NO_PART: Final = frozenset({"request", "control", "edge"})
"""Kinds of subjects on which an unreadable record does not belong to a request. Anybody may write to the
first two, and unreadable records there have no effect; workers ignore those on the third.
"""
_WORKERS: Final = frozenset({"done", "output"})
"""Kinds of subjects on which any worker may write; an unreadable record of one without an order is void."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """The first event in a request's log that differs from the repeated decision.

    `expected` and `recorded` are plain data, None if absent; `state` is the request before the event.
    """

    seq: int | None
    what: str
    expected: dict[str, Any] | None = None
    recorded: dict[str, Any] | None = None
    state: dict[str, Any] | None = None


@dataclass(slots=True, kw_only=True)
class Verdict:
    """The result of replaying one request.

    Attributes:
        void: records of deposed conductors, which have no effect.
        refusal: the recorded reason of the last refused submission under this id.
        weights: the digests of what its nodes were last placed on, as recorded; empty in older logs.
        changed_weights: the resumptions on other weights, in words.
        ignored: records of workers that had no order for this request, counted by writer and reason.
    """

    request_id: str
    phase: Phase = Phase.WAITING
    events: int = 0
    decided: int = 0
    adopted: int = 0
    void: int = 0
    refusal: str | None = None
    pins: list[str] = field(default_factory=list)
    weights: dict[str, str] = field(default_factory=dict)
    changed_weights: list[str] = field(default_factory=list)
    ignored: dict[str, int] = field(default_factory=dict)
    mismatch: Mismatch | None = None

    @property
    def matches(self) -> bool:
        return self.mismatch is None


@dataclass(slots=True)
class Replayer:
    """Replays records in log order, of one request or of many; `verdicts` has one entry per request.

    `pins` returns the current digests of a family; differing ones are named in the verdict. `incomplete` are
    requests of which some chunks are missing: their outputs are not compared.
    """

    graph_of: Callable[[str], ModelGraph]
    subjects: Subjects
    pins: Callable[[str], dict[str, str]] | None = None
    incomplete: Collection[str] = ()
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    _outputs: dict[str, RequestOutput] = field(default_factory=dict)
    _cluster: Cluster = field(init=False)

    def __post_init__(self) -> None:
        self._cluster = Cluster(self.graph_of, self.subjects, retention=REPLAY)

    def run(self, records: Iterable[StoredRecord]) -> dict[str, Verdict]:
        """Replay all `records`; return the verdicts in order of submission."""
        for record in records:
            self.replay_record(record)
        return self.close()

    @property
    def cluster(self) -> Cluster:
        """The state after the last record. Read only."""
        return self._cluster

    def transcript(self, request_id: str) -> Transcript:
        """The output of a request after the last record; empty if the request is not replayed."""
        return self._output(request_id).transcript

    def _output(self, request_id: str) -> RequestOutput:
        return self._outputs.get(request_id) or RequestOutput()

    def close(self) -> dict[str, Verdict]:
        """End the log: every decision must be recorded by now."""
        for request_id in self.verdicts:
            self._close(request_id)
        return self.verdicts

    def replay_record(self, record: StoredRecord) -> None:
        """Replay one record."""
        entry = self._cluster.read(record)
        if isinstance(entry, Folded):
            self._unreadable(record, entry)
            return
        request_id, event = entry.address.request_id, entry.event
        if isinstance(event, OutputChunk):  # most of a log, and not a decision
            self._fold_chunk(entry.address, event)
            return
        before = self._cluster.request(request_id) if request_id else None
        folded = self._cluster.apply(entry)
        if request_id is None:
            return
        verdict = self.verdicts.get(request_id)
        if verdict is None and isinstance(event, RequestSubmitted):
            verdict = self._begin(request_id)
        if verdict is None or verdict.mismatch is not None:
            return
        if folded.void:
            verdict.void += 1
            return
        verdict.events += 1
        self._outputs[request_id].fold(entry.address, event)
        verdict.mismatch = self._check(record, event, before, folded, verdict)

    # ---- one record --------------------------------------------------------------------------------
    def _begin(self, request_id: str) -> Verdict:
        self._outputs[request_id] = RequestOutput()
        verdict = self.verdicts[request_id] = Verdict(request_id=request_id)
        return verdict

    def _fold_chunk(self, address: Address, chunk: OutputChunk) -> None:
        verdict = self.verdicts.get(str(address.request_id))
        if verdict is None or verdict.mismatch is not None:
            return
        verdict.events += 1
        output = self._outputs[verdict.request_id]
        if not output.fold(address, chunk) and output.objections and not output.advises(address, chunk):
            objections = {str(one): count for one, count in output.objections.items()}
            verdict.ignored = verdict.ignored | objections  # a new dict: earlier verdicts keep theirs

    def _unreadable(self, record: StoredRecord, folded: Folded) -> None:
        address = self.subjects.parse(record.subject)
        request_id = str(address.request_id) if address else ""
        verdict = self.verdicts.get(request_id)
        if verdict is None and folded.decisions:  # the refusal of a submission must be recorded too
            verdict = self._begin(request_id)
            verdict.events = 1
        if address is None or address.kind in _NO_PART or is_answer_of_server(record.data):
            return
        if verdict is None or not verdict.matches:
            return
        if (stranger := self._stranger(address)) is not None:
            verdict.ignored = verdict.ignored | {stranger: verdict.ignored.get(stranger, 0) + 1}
            return
        verdict.mismatch = Mismatch(seq=record.seq, what=folded.note or f"record {record.seq} is unreadable")

    def _stranger(self, address: Address) -> str | None:
        """Describe the writer of an unreadable record if it is a worker that the request is not placed on."""
        writer = worker_writer(address.rank) if address.rank is not None else str(address.writer)
        is_worker = address.kind in _WORKERS and writer != CONDUCTOR_WRITER
        if not is_worker or self._output(str(address.request_id)).is_placed_on(writer):
            return None
        return f"{writer}: unreadable, by a writer without an order"

    def _check(
        self, record: StoredRecord, event: AnyEvent, before: Request | None, folded: Folded, verdict: Verdict
    ) -> Mismatch | None:
        after = self._cluster.request(verdict.request_id)
        if after is not None:  # checked now: the oldest ended requests are not kept
            verdict.phase = after.phase
        if isinstance(event, RequestRejected):
            verdict.refusal = f"{event.failure.code}: {event.failure.message}"
        if event.writer == CONDUCTOR_WRITER and (event.epoch or 0) > self._cluster.fence.epoch:
            what = f"{event.id} is from epoch {event.epoch}, but the log has no earlier epoch.opened of it"
            return Mismatch(seq=record.seq, what=what, recorded=plain(event), state=_state(before))
        if folded.divergence is not None:
            expected = before.expected.get(event.id) if before else None
            what = folded.divergence.message
            return Mismatch(
                seq=record.seq,
                what=what,
                expected=plain(expected) if expected else None,
                recorded=plain(event),
                state=_state(before),
            )
        if folded.confirmed:
            verdict.decided += 1
        elif before and after and event.id in after.recorded and event.id not in before.recorded:
            verdict.adopted += 1
        if isinstance(event, RequestAdmitted) and self.pins is not None:
            verdict.pins = _differing(event.pins, self.pins(event.family))
        if isinstance(event, RequestAdmitted | RequestResumed):
            _note_weights(verdict, event)
        return self._check_output(record, event, before, verdict)

    def _check_output(
        self, record: StoredRecord, event: AnyEvent, before: Request | None, verdict: Verdict
    ) -> Mismatch | None:
        transcript = self._outputs[verdict.request_id].transcript
        if verdict.request_id in self.incomplete:
            return None
        match event:
            case RequestFinished() if not transcript.matches(event.output):
                found = transcript.totals_of(event.output.form)
                return _other_output(record.seq, event, found, event.output, before)
            case WalkCompleted() if before is not None and is_of_a_step(before, event):
                return self._check_report(record.seq, event, before, transcript)
        return None

    def _check_report(
        self, seq: int, event: WalkCompleted, before: Request, transcript: Transcript
    ) -> Mismatch | None:
        for name, reported in {"": event.output, **event.tracks}.items():
            track = transcript.tracks.get(name)
            found = track.totals_of(reported.form) if track else OutputTotals()
            if reported.chunks and reported != found:
                return _other_output(seq, event, found, reported, before)
        assert before.admitted is not None, "a running step belongs to an admitted request"
        streams = self.graph_of(before.admitted.family).streams
        walks = {result.name for result in event.results}
        for name, totals in event.streams.items():
            cuts = [
                info
                for (stream, _), info in streams.items()
                if stream == name and info.consumer_walk in walks
            ]
            if not any(_may_be(info, totals) for info in cuts):
                expected = sorted({chunks_of(info.policy, totals.items) - totals.left for info in cuts})
                return Mismatch(
                    seq=seq,
                    what=f"{event.id} reports other chunks of stream {name!r} than its policy makes",
                    expected={"items": totals.items, "chunks": expected[0] if expected else None},
                    recorded=msgspec.to_builtins(totals),
                    state=_state(before),
                )
        return None

    def _close(self, request_id: str) -> None:
        verdict, request = self.verdicts[request_id], self._cluster.request(request_id)
        if not verdict.matches:
            return
        if request is None:
            if not verdict.phase.ended:
                self._close_refused(verdict)
            return
        verdict.phase = request.phase
        if verdict.void and request.phase is Phase.WAITING:
            verdict.mismatch = Mismatch(
                seq=None,
                what=f"all {verdict.void} decisions are from closed epochs and have no effect",
                state=_state(request),
            )
        elif missing := next(iter(request.expected.values()), None):
            verdict.mismatch = Mismatch(
                seq=None,
                what=f"{missing.id} is decided, but the log does not have it",
                expected=plain(missing),
                state=_state(request),
            )

    def _close_refused(self, verdict: Verdict) -> None:
        verdict.phase = Phase.REJECTED
        if not verdict.decided:
            what = f"the submission of {verdict.request_id} is refused, but the log has no such refusal"
            verdict.mismatch = Mismatch(seq=None, what=what)


def _note_weights(verdict: Verdict, event: RequestAdmitted | RequestResumed) -> None:
    if changes := weights.changed(verdict.weights, event.weights):
        verdict.changed_weights.append(f"attempt {event.attempt} had other weights: {'; '.join(changes)}")
    verdict.weights = verdict.weights | event.weights


def _may_be(info: StreamLink, totals: StreamTotals) -> bool:
    """Tell whether a policy can have cut this many items into this many chunks."""
    return any(_cuts(policy, info, totals) for policy in possible_policies(info.policy))


def _cuts(policy: ChunkPolicy, info: StreamLink, totals: StreamTotals) -> bool:
    chunks = chunks_of(policy, totals.items)
    if totals.left:  # all windows over the items of its chunks, without a final chunk
        return totals.chunks == chunks - 1
    return totals.chunks == chunks or (info.after_end == "empty" and totals.chunks > chunks)


def _other_output(
    seq: int, event: Event, found: OutputTotals, reported: OutputTotals, before: Request | None
) -> Mismatch:
    return Mismatch(
        seq=seq,
        what=f"{event.id} reports an output that is not the one in the log",
        expected=msgspec.to_builtins(found),
        recorded=msgspec.to_builtins(reported),
        state=_state(before),
    )


def plain(event: Event) -> dict[str, Any]:
    """An event as plain data with bytes in hex, for display and for comparison by field."""
    data = msgspec.to_builtins(event, builtin_types=(bytes,))
    return {name: _hex(value) for name, value in data.items()}


def differences(expected: dict[str, Any], recorded: dict[str, Any]) -> list[str]:
    """The differing fields and their values; the writer's stamps are ignored."""
    names = sorted((expected.keys() | recorded.keys()) - {"writer", "number", "epoch"})
    return [
        f"{name}: expected {expected.get(name)!r}, recorded {recorded.get(name)!r}"
        for name in names
        if expected.get(name) != recorded.get(name)
    ]


def _hex(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {key: _hex(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_hex(item) for item in value]
    return value


def _state(request: Request | None) -> dict[str, Any] | None:
    """The state before an event, for display: without the whole submission."""
    if request is None:
        return None
    return {
        "phase": str(request.phase),
        "attempt": request.attempt,
        "running": [
            {
                "index": step.index,
                "partition": step.partition,
                "lives": {str(rank): incarnation for rank, incarnation in step.incarnations.items()},
                "reported": sorted(step.parts),
            }
            for step in request.running
        ],
        # An ended request keeps no results: showing 0 would be wrong.
        "steps_done": None if request.phase.ended else len(request.results),
        "expected": sorted(request.expected),
        "recorded": sorted(request.recorded),
        "history": request.history.hex(),
    }


def _differing(recorded: Pins, now: dict[str, str]) -> list[str]:
    pinned = msgspec.to_builtins(recorded)
    return [
        f"{name} was {pinned[name]}, is {digest}"
        for name, digest in sorted(now.items())
        if pinned.get(name) != digest
    ]
