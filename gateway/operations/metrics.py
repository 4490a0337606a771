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
from shared.log.port import LogState, LogStats
from shared.meters import ConductorMeters, EdgeMeters, PrefixMeters, TensorMeters, WorkerMeters

SCHEDULER: Final = "priority"
"""The order of an engine's queue: priority, deadline, tenant, arrival (`workers.kv_engine.scheduler`)."""

MEDIA_TYPES: Final = ("text/plain", "application/openmetrics-text")

_Meters = TypeVar("_Meters", bound=msgspec.Struct)
_PartMeters: TypeAlias = TensorMeters | EdgeMeters | PrefixMeters
_Names: TypeAlias = Sequence[tuple[str, str, str]]
"""Metrics of one kind: the field of the number, the metric's name, and its help."""

_LOG_GAUGES: Final[_Names] = (
    ("last_seq", "last_sequence", "Position of the newest event."),
    ("messages", "events", "Events in the log."),
    ("bytes", "bytes", "Bytes in the log."),
    ("max_bytes", "max_bytes", "Bytes that the log may hold."),
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
        yield from self._log_state()
        yield from self._log_clients()
        yield from self._conductors()
        yield from self._workers()

    # ---- the gateway ---------------------------------------------------------------------------------
    def _answers(self) -> Iterator[Metric]:
        gateway, meter = self._gateway, self._meter
        served = (_version(), gateway.served.name, gateway.served.family)
        yield gauge("build_info", "Version and served model.", ("version", "model", "family"), {served: 1})
        yield counter(
            "requests",
            "Answers that ended.",
            ("route", "outcome"),
            {(route, outcome): count for (route, outcome), count in meter.outcomes.items()},
        )
        yield gauge("requests_in_flight", "Answers in progress.", (), {(): gateway.in_flight.count})
        yield counter("prompt_tokens", "Prompt tokens of answers that ended.", (), {(): meter.prompt_tokens})
        yield counter("generated_tokens", "Tokens sent to clients.", (), {(): meter.generated_tokens})
        yield counter(
            "http_requests",
            "HTTP responses.",
            ("method", "route", "status"),
            {(method, route, str(status)): count for (method, route, status), count in meter.http.items()},
        )

    def _recoveries(self) -> Iterator[Metric]:
        meter = self._meter
        yield counter(
            "answers_resumed",
            "Answers resumed by a client that had a part of them.",
            ("route",),
            {(route,): count for route, count in meter.resumed.items()},
        )
        yield counter(
            "requests_resumed",
            "Requests, of all gateways, that continued after the loss of a worker.",
            (),
            {(): meter.requests_resumed},
        )
        yield counter(
            "workers_lost",
            "Incarnations of workers that were declared lost.",
            ("rank",),
            {(str(rank),): meter.workers_lost[rank] for rank in self._gateway.served.ranks},
        )

    def _latencies(self) -> Iterator[Metric]:
        routes = self._meter.latency.items()
        yield histogram(
            "time_to_first_token_seconds",
            "From the request's body to the first token sent.",
            ("route",),
            {(route,): latency.first_token_s for route, latency in routes},
        )
        yield histogram(
            "inter_token_seconds",
            "From one token to the next of the same choice.",
            ("route",),
            {(route,): latency.inter_token_s for route, latency in routes},
        )
        yield histogram(
            "request_seconds",
            "From the request's body to the end of an answer that finished.",
            ("route",),
            {(route,): latency.request_s for route, latency in routes},
        )
        hops = self._meter.hops
        yield histogram(
            "hop_seconds",
            "Hops of a request over the log, measured at this gateway.",
            ("hop",),
            {(hop,): took_s for hop, took_s in hops.took_s.items()},
        )
        yield histogram(
            "log_delivery_seconds",
            "From the storing of an event to its reading at this gateway.",
            (),
            {(): hops.delivery_s},
        )

    # ---- the log -------------------------------------------------------------------------------------
    def _log_state(self) -> Iterator[Metric]:
        log = self._log
        yield gauge("log_up", "1 if the log answers.", (), {(): float(log is not None)})
        for field, name, help_ in _LOG_GAUGES:
            number = getattr(log, field, None)
            yield gauge(f"log_{name}", help_, (), {} if number is None else {(): number})

    def _log_clients(self) -> Iterator[Metric]:
        stats: dict[LabelValues, LogStats] = {}
        if (own := self._gateway.log_stats()) is not None:
            stats["gateway", self._gateway.origin] = own
        for role, processes in (("conductor", self.conductors), ("worker", self.workers)):
            stats |= {(role, one.name): one.meters.log for one in processes if one.is_fresh and one.meters}
        labels = ("role", "name")
        yield histogram(
            "publish_ack_seconds",
            "From publishing an event to its ack.",
            labels,
            {who: each.publish_ack_s for who, each in stats.items()},
        )
        yield gauge(
            "unacked_events",
            "Events published and not acked.",
            labels,
            {who: each.unacked for who, each in stats.items()},
        )
        yield gauge(
            "log_lag_events",
            "Events of its subjects that it has not read yet.",
            labels,
            {who: each.behind for who, each in stats.items()},
        )

    # ---- the other roles -----------------------------------------------------------------------------
    def _conductors(self) -> Iterator[Metric]:
        label, fresh = ("conductor",), [one for one in self.conductors if one.is_fresh]
        yield gauge(
            "conductor_up",
            "1 while its heartbeats arrive.",
            label,
            {(one.name,): one.is_fresh for one in self.conductors},
        )
        yield gauge(
            "conductor_leading",
            "1 for the conductor that decides.",
            label,
            {(one.name,): one.state == "leading" for one in fresh},
        )
        for fact, name, help_ in _CONDUCTOR_FACTS:
            yield gauge(f"conductor_{name}", help_, label, {(one.name,): one.number(fact) for one in fresh})
        counted = {(one.name,): one.meters for one in fresh if one.meters}
        yield counter(
            "conductor_folded_events",
            "Events it has read from the log and applied.",
            label,
            {who: each.folded for who, each in counted.items()},
        )
        yield counter(
            "conductor_decisions",
            "Decisions it has published.",
            label,
            {who: each.decisions for who, each in counted.items()},
        )

    def _workers(self) -> Iterator[Metric]:
        label, fresh = ("rank",), [one for one in self.workers if one.is_fresh]
        up: dict[LabelValues, float] = {(str(rank),): 0 for rank in self._gateway.served.ranks}
        yield gauge(
            "worker_up",
            "1 while its heartbeats arrive.",
            label,
            up | {(one.name,): one.is_fresh for one in self.workers},
        )
        yield gauge(
            "worker_ready",
            "1 while it takes orders.",
            label,
            {(one.name,): one.state == "ready" for one in fresh},
        )
        for fact, name, help_ in _WORKER_FACTS:
            yield gauge(f"worker_{name}", help_, label, {(one.name,): one.number(fact) for one in fresh})
        kernels: dict[LabelValues, float] = {
            (one.name, str(one.facts["kernels"])): 1 for one in fresh if one.facts.get("kernels")
        }
        yield gauge(
            "worker_info", "The kernels that compute its model's layers.", ("rank", "kernels"), kernels
        )
        yield counter(
            "worker_steps", "Engine steps.", label, {(one.name,): one.number("steps") for one in fresh}
        )
        counted: dict[LabelValues, WorkerMeters] = {(one.name,): one.meters for one in fresh if one.meters}
        yield counter(
            "worker_sequences",
            "Sequences that the engine has admitted.",
            label,
            {who: each.sequences for who, each in counted.items()},
        )
        computed = {(*who, "computed"): each.computed_tokens for who, each in counted.items()}
        sampled = {(*who, "sampled"): each.sampled_tokens for who, each in counted.items()}
        yield counter(
            "worker_tokens",
            "Tokens run through the model, and tokens sampled from it.",
            ("rank", "kind"),
            computed | sampled,
        )
        yield histogram(
            "worker_step_seconds",
            "Duration of an engine step.",
            label,
            {who: each.step_s for who, each in counted.items()},
        )
        yield histogram(
            "worker_batch_sequences",
            "Sequences in an engine step.",
            label,
            {who: each.batch_rows for who, each in counted.items()},
        )
        yield from _tensors({who: each.tensors for who, each in counted.items()})
        yield from _edges({who: each.edges for who, each in counted.items()})
        yield from _prefixes({who: each.prefix for who, each in counted.items()})


def _prefixes(counted: Mapping[LabelValues, PrefixMeters]) -> Iterator[Metric]:
    yield counter(
        "worker_prefix_cache_tokens",
        "Tokens of admitted sequences (queries), and those found in the prefix cache (hits).",
        ("rank", "kind"),
        _by_kind(counted, _PREFIX_KINDS),
    )
    yield gauge(
        "worker_kv_kept_tokens",
        "Tokens of KV cache that are cached for other requests, and not in use.",
        ("rank",),
        _field(counted, "kept"),
    )
    yield counter(
        "worker_preemptions",
        "Sequences that released their KV cache, and are computed again later.",
        ("rank",),
        _field(counted, "preempted"),
    )
    yield counter(
        "worker_speculative_tokens",
        "Tokens drafted by speculative decoding, and those that were accepted.",
        ("rank", "kind"),
        _by_kind(counted, _SPECULATION_KINDS),
    )


def _tensors(counted: Mapping[LabelValues, TensorMeters]) -> Iterator[Metric]:
    for field, name, help_ in _TENSOR_GAUGES:
        yield gauge(f"worker_{name}", help_, ("rank",), _field(counted, field))
    yield counter(
        "worker_tensors",
        "Tensors put, read, gone before they were read, and refused.",
        ("rank", "kind"),
        _by_kind(counted, _TENSOR_KINDS),
    )
    yield counter(
        "worker_tensor_fetched_bytes",
        "Bytes read from other workers.",
        ("rank",),
        _field(counted, "fetched_bytes"),
    )


def _edges(counted: Mapping[LabelValues, EdgeMeters]) -> Iterator[Metric]:
    yield counter(
        "worker_edge_events",
        "Edge events sent to other ranks, and received from them.",
        ("rank", "direction"),
        _by_kind(counted, _EDGE_DIRECTIONS),
    )
    for field, name, help_ in _EDGE_GAUGES:
        yield gauge(f"worker_{name}", help_, ("rank",), _field(counted, field))
    for field, name, help_ in _EDGE_COUNTERS:
        yield counter(f"worker_{name}", help_, ("rank",), _field(counted, field))


def _field(counted: Mapping[LabelValues, _PartMeters], field: str) -> dict[LabelValues, float]:
    """One number of each rank."""
    return {who: getattr(meters, field) for who, meters in counted.items()}


def _by_kind(
    counted: Mapping[LabelValues, _PartMeters], kinds: Mapping[str, str]
) -> dict[LabelValues, float]:
    """Several numbers of each rank; `kinds` maps their fields to the values of a label."""
    return {
        (*who, kind): getattr(meters, field)
        for who, meters in counted.items()
        for field, kind in kinds.items()
    }


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
