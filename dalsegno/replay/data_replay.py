"""Data replay: runs a request's nodes again from their recorded inputs, and compares the outputs.

A worker with the deployment's configuration runs all nodes on one rank, in this process, on a log in memory.
It gets the recorded orders (those of the attempt that counted) with their recorded inputs; a tensor that was
not inline is replaced by the repeated one. So a node that diverges does not change the next step's inputs, as
far as those are recorded.

Where a token differs, the answer is resumed after the *recorded* token, as after a worker's death: so each
later token is compared with the model's choice for the same text.

A run also depends on the checkpoint, the device and its kernels, and the precision. On the same machine it is
expected to be exact; for another machine the user states a tolerance.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from conductor.core import weights
from configs.deployment import PROCESS_SECTIONS, DeploymentConfig
from configs.placement import NodeGroup
from dalsegno.config import resolve
from dalsegno.history.request_media import RecordedMedium
from dalsegno.replay import recorded_run, run_comparison
from dalsegno.replay.recorded_request import History
from dalsegno.replay.recorded_run import RecordedStep, Run
from dalsegno.replay.resubmission import error_in
from dalsegno.replay.run_comparison import ComparedEdge
from models import registry
from models.base import EngineKind
from models.programs import PROGRAM
from models.sequence_request import SequenceRequest, changed
from shared.errors import ClientError
from shared.events import (
    MAX_LOGPROBS,
    EpochOpened,
    Event,
    Limits,
    NodeReady,
    OutputChunk,
    OutputFence,
    Pins,
    RequestAdmitted,
    TokenLogprobs,
    WalkCall,
    WalkCompleted,
    WalkFailed,
    WorkerJoined,
    decode,
    encode,
)
from shared.ids import Rank
from shared.log.memory import MemoryLog, MemoryStore
from shared.subjects import CONDUCTOR_WRITER, Subjects, worker_writer
from shared.tensors import Handle
from shared.walks import ToClient

MAX_FORCED: Final = 16
"""An answer is resumed after at most this many differing tokens."""
_RANK: Final = Rank(0)
_ORIGIN: Final = "replay"
_EVENT_BYTES: Final = 64 * 1024 * 1024


class DataReplayResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one request's data replay.

    Attributes:
        edges: in order of output.
        first: the first edge that diverges; None if there is none.
        forced: the places where the model chooses another token for the recorded text.
        unfinished: True if there may be more such places.
        other_weights: the nodes whose recorded weights are not those of the checkpoint here, in words.
    """

    request_id: str
    source: str | None
    tolerance: float | None
    edges: list[ComparedEdge]
    forced: list[str] = []
    unfinished: bool = False
    other_weights: list[str] = []

    @property
    def first(self) -> ComparedEdge | None:
        return next((edge for edge in self.edges if edge.diverges is not None), None)


def loaded_config(model: str | None, history: History) -> DeploymentConfig:
    """Return the configuration of `model`, or the recorded one, with all its nodes on one rank.

    Raises:
        ClientError: it cannot be served, or is of another family than the request.
    """
    config = _in_force(history) if model is None else resolve.effective(model, ()).config
    families = {event.family for event in history.admitted.values()}
    if families - {config.model}:
        known = ", ".join(sorted(families))
        raise ClientError(f"{model} is of the family {config.model}; the request was answered by {known}")
    nodes = sorted({node for group in config.groups for node in group.nodes})
    return msgspec.structs.replace(
        config, node_groups=[NodeGroup(node_names=nodes, ranks=[_RANK])], devices={}
    )


def _in_force(history: History) -> DeploymentConfig:
    """The configuration under which the request was admitted, if it is known."""
    pinned = [event.pins.config for event in history.admitted.values()]
    known = history.configs.get(pinned[0]) if pinned else None
    if not isinstance(known, dict):
        raise ClientError(
            "the recorded configuration is not known here: name the model with --config, "
            "as for `dalsegno serve`"
        )
    values = {key: value for key, value in known.items() if key not in ("name", *PROCESS_SECTIONS)}
    return resolve.of_values(values, str(known["name"])).config


async def execute(
    history: History, config: DeploymentConfig, tolerance: float | None
) -> list[DataReplayResult]:
    """Run the nodes of every admitted request of a history again.

    Raises:
        DalSegnoError: the model cannot be loaded, or the history lacks what a replay needs.
    """
    if history.is_redacted:
        raise ClientError(f"{history.source} is redacted: it does not contain the nodes' inputs")
    all_admitted = history.admitted
    admitted = [one for one in history.requests if one in all_admitted]
    if not admitted:
        raise ClientError(f"request {history.requests[0]} was not admitted: none of its nodes ran")
    async with _joined_worker(config, history.media) as bench:
        return [await _executed(bench, history, one, tolerance) for one in admitted]


async def _executed(
    bench: "_ReplayWorker", history: History, request_id: str, tolerance: float | None
) -> DataReplayResult:
    recorded = recorded_run.run_of(history.records, history.subjects, request_id, history.left_out)
    found = await bench.run_all(recorded)
    _stop_as_recorded(recorded, found)
    forced, unfinished = await _forced(bench, recorded, found, tolerance)
    excused: dict[str, str] = {}
    for track in {one.track for one in forced}:
        own = [one for one in forced if one.track == track]
        if all(one.is_near for one in own) and not unfinished:
            excused[track] = f"{len(own)} differ, each between tokens as likely within {tolerance:g}"
    return DataReplayResult(
        request_id=request_id,
        source=history.source,
        tolerance=tolerance,
        edges=run_comparison.compared(recorded, found, tolerance, excused, kept_modalities(bench.config)),
        forced=[one.text for one in forced],
        unfinished=unfinished,
        other_weights=weights.changed(history.weights(request_id), bench.weights),
    )


def _stop_as_recorded(recorded: Run, found: Run) -> None:
    """Cut the output of a token program whose step was stopped; `_call` leaves its limit as it was."""
    if any(step.runs_token_program and not step.results for step in recorded.steps.values()):
        for track in found.tracks:
            found.cut_like(recorded, track)


def kept_modalities(config: DeploymentConfig) -> dict[str, frozenset[str]]:
    """By output track, the modalities whose released values stand (`Edge.on_resume`)."""
    graph = registry.graph(config.model)
    found: defaultdict[str, set[str]] = defaultdict(set)
    for walk in graph.walks.values():
        for route in (route for node in walk.node_table for route in node.routes):
            if route.keeps_released and isinstance(route.to, ToClient):
                found[graph.tracks[route.source]].add(route.to.modality)
    return {track: frozenset(modalities) for track, modalities in found.items()}


@dataclass(frozen=True, slots=True)
class _ForcedToken:
    """A place where the model's token differs from the recorded one. `is_near`: within the tolerance."""

    track: str
    text: str
    is_near: bool


async def _forced(
    bench: "_ReplayWorker", recorded: Run, found: Run, tolerance: float | None
) -> tuple[list[_ForcedToken], bool]:
    """Return every such place, and True if there may be more."""
    differing: list[_ForcedToken] = []
    for track in recorded.tracks:
        was, step = recorded.tokens(track), _speaking(recorded)
        becomes, logprobs, begin = found.tokens(track), found.logprobs(track), 0
        while (
            step is not None and (place := run_comparison.first_difference(was[begin:], becomes)) is not None
        ):
            if place >= len(was) - begin or place >= len(becomes):
                break  # one of them ended: there is no other token to compare
            report, is_near = _differing(begin + place, was, becomes[place], logprobs[place:], tolerance)
            differing.append(_ForcedToken(track, report, is_near))
            begin = _next_begin(recorded, step, track, begin + place)
            if len(differing) == MAX_FORCED:
                return differing, True
            if begin == len(was):
                break
            again = await bench.resume(recorded, step, track, was[:begin])
            becomes, logprobs = again.tokens(track)[begin:], again.logprobs(track)
    return differing, False


def _next_begin(recorded: Run, step: int, track: str, place: int) -> int:
    """The number of recorded tokens to resume after, where the one at `place` differs."""
    if recorded.steps[step].runs_token_program:
        return recorded.boundary_after(track, place)  # a program goes on after whole emissions
    return place + 1


def _differing(
    place: int, was: Sequence[int], becomes: int, logprobs: Sequence[TokenLogprobs], tolerance: float | None
) -> tuple[str, bool]:
    """Describe a differing token; True if both tokens are equally likely within the tolerance."""
    report = f"at token {place}: recorded {was[place]}, found {becomes}"
    if not logprobs:
        return report, False  # a token program gives none
    known = run_comparison.logprobs_in(logprobs[0])
    if was[place] not in known or becomes not in known:
        return f"{report}; the recorded one is not among the {MAX_LOGPROBS} likeliest", False
    gap = abs(known[was[place]] - known[becomes])
    report += f"; their log probabilities are {known[was[place]]:.4f} and {known[becomes]:.4f}"
    return report, tolerance is not None and gap <= tolerance


def _speaking(run: Run) -> int | None:
    """The index of the only step that samples tokens; None if there are several."""
    found = [index for index, step in run.steps.items() if step.samples_tokens]
    return found[0] if len(found) == 1 else None


# ---- the worker ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _ReplayWorker:
    """A worker that has joined, and the in-memory log that it reads."""

    server: MemoryStore
    log: MemoryLog
    subjects: Subjects
    config: DeploymentConfig
    incarnation: int = 0
    weights: dict[str, str] = field(default_factory=dict)
    _names: int = 0
    _made: dict[str, Handle] = field(default_factory=dict)

    async def run_all(self, recorded: Run) -> Run:
        """Order every step, each after the steps it followed; return the run."""
        name, done = self._admitted(), set[int]()
        ordered: set[int] = set()
        self._made.clear()
        while len(done) < len(recorded.steps):
            for index, step in sorted(recorded.steps.items()):
                if index not in ordered and step.after <= done:
                    self._order(self._again(recorded, index, name))
                    ordered.add(index)
            if done == ordered:
                raise ClientError(
                    f"the recorded steps {sorted(recorded.steps)} are incomplete: no further step can start"
                )
            event = await self._done(name, done)
            done.add(event.index)
            if isinstance(event, WalkFailed):
                why = f"{event.failure.code}: {event.failure.message}"
                raise ClientError(f"step {event.index} fails when it is run again: {why}")
            for result in event.results:
                for handle in result.outputs.values():
                    self._made[_edge_of(handle.key)] = handle
        return recorded_run.run_of(self.server.records, self.subjects, name)

    async def resume(self, recorded: Run, index: int, track: str, tokens: Sequence[int]) -> Run:
        """Resume one step after `tokens`; return the run."""
        name = self._admitted()
        order = self._again(recorded, index, name)
        walks = [changed(walk, echo=None) if self._runs_kv(walk) else walk for walk in order.walks]
        order = msgspec.structs.replace(order, walks=walks)
        generated = OutputChunk(
            id=f"{name}.generated",
            writer="w0",
            request_id=name,
            attempt=1,
            incarnation=self.incarnation,
            track=track,
            token_ids=list(tokens),
            text=self._text_of(order, tokens),
        )
        fence = OutputFence(
            id=f"{name}.fence.2",
            writer=CONDUCTOR_WRITER,
            epoch=1,
            request_id=name,
            attempt=2,
            reason="the recorded tokens",
            history=b"",
            lives={worker_writer(_RANK): self.incarnation},
        )
        self._put(self.subjects.output(_ORIGIN, name, "w0"), generated)
        self._put(self.subjects.output(_ORIGIN, name, CONDUCTOR_WRITER), fence)
        self._order(msgspec.structs.replace(order, id=f"{order.id}.2", attempt=2))
        await self._done(name, set())
        return recorded_run.run_of(self.server.records, self.subjects, name)

    def _admitted(self) -> str:
        """Admit a request on the in-memory log, so that the worker may write its output; return its id."""
        self._names += 1
        name = f"replay-{self._names}"
        admitted = RequestAdmitted(
            id=f"{name}.admitted",
            writer=CONDUCTOR_WRITER,
            epoch=1,
            request_id=name,
            attempt=1,
            family=self.config.model,
            seed=0,
            placement={},
            lives={worker_writer(_RANK): self.incarnation},
            limits=Limits(max_seq_len=0, kv_tokens=0, default_max_tokens=0),
            pins=Pins(graph="", plan="", config="", core="", submission=""),
            reason="data replay",
        )
        self._put(self.subjects.walk(name), admitted)
        return name

    # ---- orders ------------------------------------------------------------------------------------
    def _again(self, recorded: Run, index: int, name: str) -> NodeReady:
        """A recorded order, for this worker and under another request id."""
        step = recorded.steps[index]
        walks = [self._call(walk, recorded, step) for walk in step.order.walks]
        return msgspec.structs.replace(
            step.order,
            id=f"{name}.ready.1.{index}.0",
            request_id=name,
            epoch=1,
            attempt=1,
            incarnation=self.incarnation,
            rank=_RANK,
            model=self.config.name,
            walks=walks,
            placement=dict.fromkeys(step.order.placement, 0),
            walk_placement={},
            lives={},
            origin=_ORIGIN,
            trace=None,
            on_probation=False,
        )

    def _call(self, walk: WalkCall, recorded: Run, step: RecordedStep) -> WalkCall:
        inputs = {
            edge: self._made.get(_edge_of(h.key), h) if h.data is None else h
            for edge, h in walk.inputs.items()
        }
        call = msgspec.structs.replace(walk, inputs=inputs)
        if not self._runs_kv(walk) or step.runs_token_program:
            return call  # a program gives no log probabilities, and another limit may change all its tokens
        request = SequenceRequest.of(walk)
        generated = max((len(recorded.tokens(track)) for track in recorded.tracks), default=0)
        logprobs = MAX_LOGPROBS if generated and request.sampling is not None else request.logprobs
        limit = request.max_tokens
        if limit is not None and not step.results:  # the step was stopped: generate as many tokens as then
            limit = max(min(limit, generated), 1)
        return changed(call, logprobs=logprobs, max_tokens=limit)

    def _runs_kv(self, walk: WalkCall) -> bool:
        """True if the walk's arguments are a `SequenceRequest`: it has a KV node, and runs no program."""
        if PROGRAM in walk.args:
            return False
        graph = registry.graph(self.config.model)
        known = graph.walks.get(walk.name)
        return known is not None and any(graph.nodes[node] is EngineKind.KV for node in known.nodes)

    def _text_of(self, order: NodeReady, tokens: Sequence[int]) -> str:
        """The text of an answer that begins with these tokens, as the worker outputs it."""
        from workers.generation.generated_text import GeneratedText

        request = SequenceRequest.of(order.walks[0])
        face = registry.module(self.config.model, "processing")
        processing = face.load(Path(self.config.checkpoint), max_seq_len=self.config.max_seq_len)
        answer = GeneratedText.for_request(processing, request, request.max_tokens or 0)
        return "".join(answer.push(token) for token in tokens)

    def _order(self, order: NodeReady) -> None:
        self._put(self.subjects.ready(_RANK, str(order.request_id)), order)

    def _put(self, subject: str, event: Event) -> int:
        return self.server.append(subject, encode(event)).seq

    async def _done(self, name: str, known: set[int]) -> WalkCompleted | WalkFailed:
        """Wait for the next finished step of a request."""
        async with aclosing(self.log.read([self.subjects.done(_RANK, name)], 1)) as records:
            async for record in records:
                event = decode(record.data)
                if isinstance(event, WalkCompleted | WalkFailed) and event.index not in known:
                    return event
        raise AssertionError("a log that is read does not end")


def _edge_of(key: str) -> str:
    """A tensor's key without its request and attempt: equal in every run."""
    return "/".join(key.split("/")[2:])


@asynccontextmanager
async def _joined_worker(
    config: DeploymentConfig, media: Sequence[RecordedMedium]
) -> AsyncIterator[_ReplayWorker]:
    """Yield a worker that has loaded the model and joined an in-memory log, with the recorded media."""
    from shared.media.memory import MemoryMediaStore
    from workers import settings
    from workers.loading.model import LocalModel
    from workers.loading.tensor_store import open_tensors
    from workers.media import assembly
    from workers.process import Worker

    subjects = Subjects(config.nats.prefix)
    server = MemoryStore(subjects, max_payload=_EVENT_BYTES)
    opened = EpochOpened(id="epoch.1", writer=CONDUCTOR_WRITER, epoch=1, conductor="replay", core="")
    server.append(subjects.epoch, encode(opened))
    bench = _ReplayWorker(server, MemoryLog(server), subjects, config)
    store = open_tensors(config, _RANK)
    media_store = MemoryMediaStore()
    for one in media:
        if one.data is not None:
            await media_store.put(one.data, tenant=one.tenant or None, content_type=one.medium.content_type)
    try:
        with assembly.over(media_store, config.media) as reading:
            model = LocalModel(config, settings.of(config), _RANK, store.allocate, media=reading.reader)
            worker = Worker(MemoryLog(server), subjects, config, _RANK, model, store, reading.copies)
            async with asyncio.TaskGroup() as tasks:
                working = tasks.create_task(worker.run())
                await _join(bench)
                yield bench
                working.cancel()
    except ExceptionGroup as group:
        raise error_in(group) from None
    finally:
        await store.close()


async def _join(bench: _ReplayWorker) -> None:
    """Wait until the worker has joined, and note its incarnation and weights."""
    async with aclosing(bench.log.read([bench.subjects.worker_any()], 1)) as records:
        async for record in records:
            event = decode(record.data)
            if isinstance(event, WorkerJoined):
                bench.incarnation, bench.weights = record.seq, event.node_weights
                return
    raise AssertionError("a log that is read does not end")


# ---- output ----------------------------------------------------------------------------------------------


def report(found: DataReplayResult) -> tuple[list[str], dict[str, Any]]:
    """The result as text lines and as JSON values."""
    first = found.first
    how = "exactly" if found.tolerance is None else f"within {found.tolerance:g}"
    whose = found.request_id if found.source is None else f"{found.source}: {found.request_id}"
    compared = sum(edge.compared for edge in found.edges)
    lines = [f"{whose}: {_line(edge)}" for edge in found.edges]
    if differing := "; ".join(found.other_weights):
        lines.append(f"{whose}: note: the weights here are not the recorded ones: {differing}")
    if first is None:
        lines.append(f"{whose}: all {len(found.edges)} edges agree {how} (data replay of {compared} values)")
    else:
        lines.append(f"{whose}: the first edge that diverges is {first.name}: {first.diverges} (data replay)")
    if found.forced:
        many = f"{len(found.forced)}{' or more' if found.unfinished else ''}"
        lines.append(f"{whose}: for the recorded text, the model chooses another token in {many} places:")
        lines += [f"  {one}" for one in found.forced]
    data = msgspec.to_builtins(found)
    assert isinstance(data, dict)
    return lines, {
        "level": "data",
        "agrees": first is None,
        "first_divergence": None if first is None else first.name,
    } | data


def _line(edge: ComparedEdge) -> str:
    note = f" ({edge.note})" if edge.note else ""
    if edge.diverges is not None:
        return f"{edge.name}: diverges {edge.diverges}{note}"
    return (
        f"{edge.name}: {edge.compared} compared, no difference{note}"
        if edge.compared
        else f"{edge.name}{note}"
    )
