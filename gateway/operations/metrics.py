"""The metrics of `/metrics` and `/metrics.json`: of the gateway, the log, and the other roles' heartbeats.

One scrape shows the whole deployment as this gateway sees it. The numbers of another process are those of its
last heartbeat, while that is fresh; a silent process is exposed as not up, and nothing else of it. Totals
count from the start of the process they belong to, as Prometheus expects.

docs/operations.md explains every series to operators.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import Any, Final, TypeAlias, TypeVar

import msgspec
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from gateway.operations.metric_families import LabelValues, counter, gauge, histogram, with_deprecated
from gateway.requests.liveness import ReceivedHeartbeat
from gateway.requests.service import Gateway
from shared.events import PARALLEL_TOKENS
from shared.log.port import LogState, LogStats
from shared.meters import (
    ConductorMeters,
    EdgeMeters,
    EncoderMeters,
    GuideMeters,
    PrefixMeters,
    StepMeters,
    TensorMeters,
    WorkerMeters,
)

SCHEDULER: Final = "priority"
"""The order of an engine's queue: priority, deadline, tenant, arrival (`workers.kv_engine.scheduler`)."""

MEDIA_TYPES: Final = ("text/plain", "application/openmetrics-text")

_Meters = TypeVar("_Meters", bound=msgspec.Struct)
_Names: TypeAlias = Sequence[tuple[str, str, str]]
"""Metrics of one kind: the field of the number, the metric's name, and its help."""

_LOG_GAUGES: Final[_Names] = (
    ("last_seq", "last_sequence", "Position of the newest event."),
    ("messages", "events", "Events in the log."),
    ("bytes", "bytes", "Bytes in the log."),
    ("max_bytes", "max_bytes", "Bytes that the log may hold."),
    ("consumers", "readers", "Readers of the log, of all keys."),
    ("max_consumers", "max_readers", "Readers that the log may have."),
)
_LATENCIES: Final[_Names] = (
    ("first_token_s", "time_to_first_token_seconds", "From the request's body to the first token sent."),
    ("inter_token_s", "inter_token_seconds", "From one token to the next of the same choice."),
    ("request_s", "request_seconds", "From the request's body to the end of an answer that finished."),
)
_GEN_AI_LABELS: Final = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model")
_LOG_CLIENT_GAUGES: Final[_Names] = (
    ("unacked", "unacked_events", "Events published and not acked."),
    ("behind", "log_lag_events", "Events of its subjects that it has not read yet."),
)
_CONDUCTOR_COUNTERS: Final[_Names] = (
    ("folded", "folded_events", "Events it has read from the log and applied."),
    ("decisions", "decisions", "Decisions it has published."),
    ("ended_readers", "ended_readers", "Readers of the log that it ended because their key had too many."),
)
_CONDUCTOR_FACTS: Final[_Names] = (
    ("epoch", "epoch", "The epoch in force, as it knows."),
    ("open", "open_requests", "Requests that have not ended."),
    ("waiting", "waiting_requests", "Requests that are not admitted yet."),
)
_WORKER_FACTS: Final[_Names] = (
    ("incarnation", "incarnation", "The log position at which the incarnation began."),
    ("progress", "load_progress", "Loaded share of the model, from 0 to 1."),
    ("running", "running_sequences", "Sequences in the engine's batch."),
    ("waiting", "waiting_sequences", "Sequences that wait for room in the batch."),
    ("kv_used", "kv_used_tokens", "Tokens of KV cache in use or reserved."),
    ("kv_total", "kv_total_tokens", "Tokens of KV cache."),
)
_WORKER_HISTOGRAMS: Final[_Names] = (
    ("step_s", "step_seconds", "Duration of an engine step."),
    ("batch_rows", "batch_sequences", "Sequences in an engine step."),
)
_TENSOR_GAUGES: Final[_Names] = (
    ("total_bytes", "tensor_arena_bytes", "Memory for tensors that other ranks may read."),
    ("free_bytes", "tensor_free_bytes", "Free part of it."),
    ("slots", "tensor_slots", "Tensors in it."),
)
_EDGE_GAUGES: Final[_Names] = (
    ("early", "out_of_order_edges", "Edge events that arrived before their order, and wait for it."),
    ("early_bytes", "out_of_order_edge_bytes", "Size of those events."),
)
_EDGE_COUNTERS: Final[_Names] = (
    ("items", "stream_items", "Stream items that it produced."),
    ("chunks", "stream_chunks", "Stream chunks that it consumed."),
)
_TENSOR_KINDS: Final = {"puts": "put", "gets": "got", "gone": "gone", "refused": "refused"}
_EDGE_DIRECTIONS: Final = {"told": "sent", "heard": "received"}
_PREFIX_KINDS: Final = {"asked": "queries", "hit": "hits"}
_ENCODER_KINDS: Final = {"hits": "hits", "misses": "misses"}
_GUIDE_REASONS: Final = {"invalid": "invalid", "turned_away": "turned_away"}
_SPECULATION_KINDS: Final = {"guessed": "drafted", "stood": "accepted"}


async def text(snapshot: "Snapshot", accept: str) -> tuple[bytes, str]:
    """All series in the format that `accept` asks for, and its content type.

    The numbers are taken at once, and encoded in a thread: encoding takes milliseconds, which would delay
    streams.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collected(list(snapshot.collect())))
    ProcessCollector(registry=registry)
    encode, content_type = choose_encoder(accept)
    return await asyncio.to_thread(encode, registry), content_type


@dataclass(frozen=True, slots=True, eq=False)
class _Collected(Collector):
    families: list[Metric]

    def collect(self) -> list[Metric]:
        return self.families


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessState:
    """A conductor or worker by its last heartbeat. `meters` is None if another version wrote them."""

    name: str
    is_fresh: bool
    state: str
    facts: dict[str, Any]
    meters: Any

    def number(self, fact: str) -> float:
        """A number among the facts; 0 if it is missing."""
        value = self.facts.get(fact)
        return float(value) if isinstance(value, int | float) else 0.0


class Snapshot:
    """The metrics at one moment: of `gateway`, and of the log's state (None if the log did not answer)."""

    def __init__(self, gateway: Gateway, log: LogState | None, now_s: float) -> None:
        self._gateway = gateway
        self._meter = gateway.meter
        self._log = log
        liveness = gateway.liveness
        self.conductors = [
            _process(name, heartbeat, ConductorMeters, is_fresh=liveness.is_fresh(heartbeat, now_s))
            for name, heartbeat in sorted(liveness.conductors.items())
        ]
        self.workers = [
            _process(str(rank), heartbeat, WorkerMeters, is_fresh=liveness.is_fresh(heartbeat, now_s))
            for rank, heartbeat in sorted(liveness.workers.items())
        ]

    def collect(self) -> Iterator[Metric]:
        """All families, the deprecated ones included."""
        return with_deprecated(self._families())

    def _families(self) -> Iterator[Metric]:
        yield from self._answers()
        yield from self._recoveries()
        yield from self._latencies()
        yield from self._gen_ai()
        yield from self._log_state()
        yield from self._log_clients()
        yield from self._conductors()
        yield from self._workers()

    # ---- the gateway ---------------------------------------------------------------------------------
    def _answers(self) -> Iterator[Metric]:
        gateway, meter = self._gateway, self._meter
        served = (_version(), gateway.served.name, gateway.served.family)
        yield gauge("build_info", "Version and served model.", ("version", "model", "family"), {served: 1})
        yield counter("requests", "Answers that ended.", ("route", "outcome"), meter.outcomes)
        yield gauge("requests_in_flight", "Answers in progress.", (), {(): gateway.in_flight.count})
        yield counter("prompt_tokens", "Prompt tokens of answers that ended.", (), {(): meter.prompt_tokens})
        yield counter("generated_tokens", "Tokens sent to clients.", (), {(): meter.generated_tokens})
        help_ = "Forward passes of diffusion language models, in answers that ended."
        yield counter("diffusion_forwards", help_, (), {(): meter.forwards})
        help_ = "Tokens of those answers (generated), and those beyond one for each pass (parallel)."
        tokens = {("generated",): meter.diffusion_tokens, ("parallel",): meter.counts[PARALLEL_TOKENS]}
        yield counter("diffusion_tokens", help_, ("kind",), tokens)
        responses = {(method, route, str(status)): n for (method, route, status), n in meter.http.items()}
        yield counter("http_requests", "HTTP responses.", ("method", "route", "status"), responses)

    def _recoveries(self) -> Iterator[Metric]:
        meter = self._meter
        resumed = {(route,): count for route, count in meter.resumed.items()}
        help_ = "Answers resumed by a client that had a part of them."
        yield counter("answers_resumed", help_, ("route",), resumed)
        help_ = "Requests, of all gateways, that continued after the loss of a worker."
        yield counter("requests_resumed", help_, (), {(): meter.requests_resumed})
        lost = {(str(rank),): meter.workers_lost[rank] for rank in self._gateway.served.ranks}
        yield counter("workers_lost", "Incarnations of workers that were declared lost.", ("rank",), lost)

    def _latencies(self) -> Iterator[Metric]:
        latencies = {(route,): latency for route, latency in self._meter.latency.items()}
        for field, name, help_ in _LATENCIES:
            yield histogram(name, help_, ("route",), _field(latencies, field))
        hops = self._meter.hops
        took_s = {(hop,): took_s for hop, took_s in hops.took_s.items()}
        help_ = "Hops of a request over the log, measured at this gateway."
        yield histogram("hop_seconds", help_, ("hop",), took_s)
        help_ = "From the storing of an event to its reading at this gateway."
        yield histogram("log_delivery_seconds", help_, (), {(): hops.delivery_s})

    def _gen_ai(self) -> Iterator[Metric]:
        """The gateway's latencies and tokens by OpenTelemetry's conventions."""
        meters = self._meter.gen_ai
        for name, help_, labels, values in (
            (
                "server_request_duration_seconds",
                "From the request's body to the end of an answer.",
                (*_GEN_AI_LABELS, "error_type"),
                meters.request_s,
            ),
            (
                "server_time_to_first_token_seconds",
                "From the request's body to the first token sent, of answers that finished.",
                _GEN_AI_LABELS,
                meters.first_token_s,
            ),
            (
                "server_time_per_output_token_seconds",
                "Mean time of a token after the first ones, of answers that finished.",
                _GEN_AI_LABELS,
                meters.output_token_s,
            ),
            (
                "client_token_usage",
                "Tokens of prompts (input) and of answers (output) that finished.",
                (*_GEN_AI_LABELS, "gen_ai_token_type"),
                meters.tokens,
            ),
        ):
            yield histogram(name, help_, labels, values, prefix="gen_ai_")

    # ---- the log -------------------------------------------------------------------------------------
    def _log_state(self) -> Iterator[Metric]:
        log = self._log
        yield gauge("log_up", "1 if the log answers.", (), {(): float(log is not None)})
        for field, name, help_ in _LOG_GAUGES:
            number = getattr(log, field, None)
            yield gauge(f"log_{name}", help_, (), {} if number is None else {(): number})

    def _log_clients(self) -> Iterator[Metric]:
        stats: dict[tuple[str, str], LogStats] = {}
        if (own := self._gateway.log_stats()) is not None:
            stats["gateway", self._gateway.origin] = own
        for role, processes in (("conductor", self.conductors), ("worker", self.workers)):
            stats |= {(role, one.name): one.meters.log for one in processes if one.is_fresh and one.meters}
        labels = ("role", "name")
        acks = _field(stats, "publish_ack_s")
        yield histogram("publish_ack_seconds", "From publishing an event to its ack.", labels, acks)
        for field, name, help_ in _LOG_CLIENT_GAUGES:
            yield gauge(name, help_, labels, _field(stats, field))

    # ---- the other roles -----------------------------------------------------------------------------
    def _conductors(self) -> Iterator[Metric]:
        label, fresh = ("conductor",), [one for one in self.conductors if one.is_fresh]
        up = {(one.name,): one.is_fresh for one in self.conductors}
        yield gauge("conductor_up", "1 while its heartbeats arrive.", label, up)
        leading = {(one.name,): one.state == "leading" for one in fresh}
        yield gauge("conductor_leading", "1 for the conductor that decides.", label, leading)
        for fact, name, help_ in _CONDUCTOR_FACTS:
            yield gauge(f"conductor_{name}", help_, label, {(one.name,): one.number(fact) for one in fresh})
        meters = {(one.name,): one.meters for one in fresh if one.meters}
        for field, name, help_ in _CONDUCTOR_COUNTERS:
            yield counter(f"conductor_{name}", help_, label, _field(meters, field))

    def _workers(self) -> Iterator[Metric]:
        label, fresh = ("rank",), [one for one in self.workers if one.is_fresh]
        up: dict[tuple[str, ...], float] = {(str(rank),): 0 for rank in self._gateway.served.ranks}
        up |= {(one.name,): one.is_fresh for one in self.workers}
        yield gauge("worker_up", "1 while its heartbeats arrive.", label, up)
        ready = {(one.name,): one.state == "ready" for one in fresh}
        yield gauge("worker_ready", "1 while it takes orders.", label, ready)
        for fact, name, help_ in _WORKER_FACTS:
            yield gauge(f"worker_{name}", help_, label, {(one.name,): one.number(fact) for one in fresh})
        kernels = {(one.name, str(one.facts["kernels"])): 1 for one in fresh if one.facts.get("kernels")}
        help_ = "The kernels that compute its model's layers."
        yield gauge("worker_info", help_, ("rank", "kernels"), kernels)
        steps = {(one.name,): one.number("steps") for one in fresh}
        yield counter("worker_steps", "Engine steps.", label, steps)
        meters = {(one.name,): one.meters for one in fresh if one.meters}
        help_ = "Sequences that the engine has admitted."
        yield counter("worker_sequences", help_, label, _field(meters, "sequences"))
        tokens = _by_kind(meters, {"computed_tokens": "computed", "sampled_tokens": "sampled"})
        help_ = "Tokens run through the model, and tokens sampled from it."
        yield counter("worker_tokens", help_, ("rank", "kind"), tokens)
        for field, name, help_ in _WORKER_HISTOGRAMS:
            yield histogram(f"worker_{name}", help_, label, _field(meters, field))
        yield from _tensors(_field(meters, "tensors"))
        yield from _edges(_field(meters, "edges"))
        yield from _prefixes(_field(meters, "prefix"))
        yield from _guides(_field(meters, "guides"))
        yield from _encoders(_field(meters, "encoders"))
        yield from _stepped(
            {(*who, node): one for who, found in meters.items() for node, one in found.stepped.items()}
        )


def _prefixes(meters: Mapping[LabelValues, PrefixMeters]) -> Iterator[Metric]:
    help_ = "Tokens of admitted sequences (queries), and those found in the prefix cache (hits)."
    yield counter("worker_prefix_cache_tokens", help_, ("rank", "kind"), _by_kind(meters, _PREFIX_KINDS))
    help_ = "Tokens of KV cache that are cached for other requests, and not in use."
    yield gauge("worker_kv_kept_tokens", help_, ("rank",), _field(meters, "kept"))
    help_ = "Sequences that released their KV cache, and are computed again later."
    yield counter("worker_preemptions", help_, ("rank",), _field(meters, "preempted"))
    help_ = "Tokens drafted by speculative decoding, and those that were accepted."
    yield counter("worker_speculative_tokens", help_, ("rank", "kind"), _by_kind(meters, _SPECULATION_KINDS))


def _encoders(meters: Mapping[LabelValues, EncoderMeters]) -> Iterator[Metric]:
    help_ = "Media that encoders looked up in their cache: found (hits), or computed (misses)."
    yield counter("worker_encoder_cache_lookups", help_, ("rank", "kind"), _by_kind(meters, _ENCODER_KINDS))
    help_ = "Size of what encoders keep of media, in bytes."
    yield gauge("worker_encoder_cache_bytes", help_, ("rank",), _field(meters, "nbytes"))


def _stepped(meters: Mapping[LabelValues, StepMeters]) -> Iterator[Metric]:
    label = ("rank", "node")
    help_ = "Runs of a node that runs in steps: under way, or waiting to be started."
    yield gauge("worker_node_runs", help_, label, _field(meters, "runs"))
    help_ = "Duration of one step of a node that runs in steps."
    yield histogram("worker_node_step_seconds", help_, label, _field(meters, "step_s"))
    help_ = "Runs that one step of such a node computes together."
    yield histogram("worker_node_step_runs", help_, label, _field(meters, "calls"))
    help_ = "Time of a run's step by itself, as a multiple of its time in the best batch."
    yield gauge("worker_node_batch_gain", help_, label, _field(meters, "gain"))


def _guides(meters: Mapping[LabelValues, GuideMeters]) -> Iterator[Metric]:
    help_ = "Guides (constrained decoding) that wait to be checked and compiled."
    yield gauge("worker_waiting_guides", help_, ("rank",), _field(meters, "waiting"))
    help_ = "Requests refused for their guide: it is invalid, or turned away by the queue or a key's budget."
    yield counter("worker_refused_guides", help_, ("rank", "reason"), _by_kind(meters, _GUIDE_REASONS))
    help_ = "Processor time of checking and compiling a guide."
    yield histogram("worker_guide_cpu_seconds", help_, ("rank",), _field(meters, "cpu_s"))


def _tensors(meters: Mapping[LabelValues, TensorMeters]) -> Iterator[Metric]:
    for field, name, help_ in _TENSOR_GAUGES:
        yield gauge(f"worker_{name}", help_, ("rank",), _field(meters, field))
    help_ = "Tensors put, read, gone before they were read, and refused."
    yield counter("worker_tensors", help_, ("rank", "kind"), _by_kind(meters, _TENSOR_KINDS))
    help_ = "Bytes read from other workers."
    yield counter("worker_tensor_fetched_bytes", help_, ("rank",), _field(meters, "fetched_bytes"))


def _edges(meters: Mapping[LabelValues, EdgeMeters]) -> Iterator[Metric]:
    help_ = "Edge events sent to other ranks, and received from them."
    yield counter("worker_edge_events", help_, ("rank", "direction"), _by_kind(meters, _EDGE_DIRECTIONS))
    for field, name, help_ in _EDGE_GAUGES:
        yield gauge(f"worker_{name}", help_, ("rank",), _field(meters, field))
    for field, name, help_ in _EDGE_COUNTERS:
        yield counter(f"worker_{name}", help_, ("rank",), _field(meters, field))


def _field(found: Mapping[LabelValues, object], field: str) -> dict[LabelValues, Any]:
    """One field of the object of each label."""
    return {who: getattr(one, field) for who, one in found.items()}


def _by_kind(found: Mapping[LabelValues, object], kinds: Mapping[str, str]) -> dict[tuple[str, ...], float]:
    """Several numbers of the object of each label; `kinds` maps their fields to the values of a label."""
    return {(*who, kind): getattr(one, field) for field, kind in kinds.items() for who, one in found.items()}


def as_json(gateway: Gateway, snapshot: Snapshot) -> dict[str, Any]:
    """The document of `/metrics.json`."""
    fresh = [one for one in snapshot.workers if one.is_fresh]
    in_flight = [int(one.number("running") + one.number("waiting")) for one in fresh]
    prefixes = [one.meters.prefix for one in fresh if one.meters]
    hits = sum(one.hit for one in prefixes)
    misses = sum(one.asked for one in prefixes) - hits
    recent = gateway.meter.recent
    rates = [tokens / took_s for took_s, tokens in recent if took_s > 0]
    return {
        "scheduler": SCHEDULER,
        "pool_size": len(fresh),
        "inflight_total": sum(in_flight),
        "inflight_per_engine": in_flight,
        # In tokens. A whole prompt is never a hit: its last token is computed to sample the next one.
        "cache": {
            "prefill_hits": 0, "prefill_misses": misses, "prefix_hits": hits, "prefix_misses": misses,
        },
        "avg_latency_s": sum(took_s for took_s, _ in recent) / len(recent) if recent else 0.0,
        "avg_throughput_tok_s": sum(rates) / len(rates) if rates else 0.0,
    }  # fmt: skip


def _process(name: str, heartbeat: ReceivedHeartbeat, kind: type[_Meters], *, is_fresh: bool) -> ProcessState:
    try:
        meters = msgspec.convert(heartbeat.facts.get("meters"), kind)
    except msgspec.ValidationError:
        meters = None
    return ProcessState(
        name=name, is_fresh=is_fresh, state=heartbeat.state, facts=heartbeat.facts, meters=meters
    )


@cache
def _version() -> str:
    return version("dalsegno")
