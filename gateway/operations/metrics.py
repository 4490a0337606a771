"""The gateway's numbers as Prometheus and others read them: its own, and what the beats of the others tell.

One scrape shows the whole deployment as this gateway sees it. What a role said last is shown while it is
fresh; of one that has fallen silent only that it is not up: its last words are no measurements. Totals begin
anew with the process they are of, as Prometheus expects of them.

What each series means, for those who run a deployment, is in docs/operations.md.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from itertools import accumulate
from typing import Any, Final, TypeVar

import msgspec
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from gateway.requests.liveness import Beat
from gateway.requests.service import Gateway
from shared.log.port import LogState, LogStats
from shared.meters import ConductorMeters, EdgeMeters, PrefixMeters, TensorMeters, WorkerMeters
from shared.telemetry.histogram import Histogram

SCHEDULER: Final = "priority"
"""How engines choose who is next: by priority, deadline, tenant, arrival (`workers.kv_engine.scheduler`)."""

MEDIA_TYPES: Final = ("text/plain", "application/openmetrics-text")

_Meters = TypeVar("_Meters", bound=msgspec.Struct)
_Labels = Mapping[tuple[str, ...], float]


async def text(snapshot: "Snapshot", accept: str) -> tuple[bytes, str]:
    """All series in the format that `accept` asks for, and its content type.

    Numbers are taken at once, and written in a thread: that takes milliseconds, which no stream is to wait.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Taken(list(snapshot.collect())))
    ProcessCollector(registry=registry)
    encode, content_type = choose_encoder(accept)
    return await asyncio.to_thread(encode, registry), content_type


@dataclass(frozen=True, slots=True, eq=False)
class _Taken(Collector):
    families: list[Metric]

    def collect(self) -> list[Metric]:
        return self.families


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """A role by its last beat. `meters` is None where they are not to be read: another version's."""

    name: str
    is_fresh: bool
    state: str
    facts: dict[str, Any]
    meters: Any

    def number(self, fact: str) -> float:
        """A number among the facts; 0 where there is none."""
        value = self.facts.get(fact)
        return float(value) if isinstance(value, int | float) else 0.0


class Snapshot:
    """One moment: `gateway` as it is, and the log as it answered (None: it did not)."""

    def __init__(self, gateway: Gateway, log: LogState | None, now_s: float) -> None:
        self._gateway = gateway
        self._meter = gateway.meter
        self._log = log
        presence = gateway.presence
        self.conductors = [
            _heard(name, beat, ConductorMeters, is_fresh=presence.is_fresh(beat, now_s))
            for name, beat in sorted(presence.conductors.items())
        ]
        self.workers = [
            _heard(str(rank), beat, WorkerMeters, is_fresh=presence.is_fresh(beat, now_s))
            for rank, beat in sorted(presence.workers.items())
        ]

    def collect(self) -> Iterator[Metric]:
        yield from self._answers()
        yield from self._recoveries()
        yield from self._latencies()
        yield from self._log_itself()
        yield from self._log_of_each_role()
        yield from self._of_conductors()
        yield from self._of_workers()

    # ---- the gateway's own -------------------------------------------------------------------------
    def _answers(self) -> Iterator[Metric]:
        gateway, meter = self._gateway, self._meter
        served = (_version(), gateway.served.name, gateway.served.family)
        yield _gauge(
            "build_info", "What is served, and by which version.", ("version", "model", "family"), {served: 1}
        )
        yield _counter(
            "requests",
            "Answers that ended.",
            ("route", "outcome"),
            {(route, outcome): count for (route, outcome), count in meter.outcomes.items()},
        )
        yield _gauge("requests_in_flight", "Answers being given now.", (), {(): gateway.running})
        yield _counter("prompt_tokens", "Prompt tokens of answers that ended.", (), {(): meter.prompt_tokens})
        yield _counter("generated_tokens", "Tokens sent to clients.", (), {(): meter.generated_tokens})
        yield _counter(
            "http_requests",
            "HTTP responses.",
            ("method", "route", "status"),
            {(method, route, str(status)): count for (method, route, status), count in meter.http.items()},
        )

    def _recoveries(self) -> Iterator[Metric]:
        meter = self._meter
        yield _counter(
            "answers_resumed",
            "Answers that went on for a client that had a part of them.",
            ("route",),
            {(route,): count for route, count in meter.resumed.items()},
        )
        yield _counter(
            "requests_resumed",
            "Requests, of all gateways, that went on after a worker's end.",
            (),
            {(): meter.requests_resumed},
        )
        yield _counter(
            "workers_lost",
            "Lives of workers that were declared over.",
            ("rank",),
            {(str(rank),): meter.workers_lost[rank] for rank in self._gateway.served.ranks},
        )

    def _latencies(self) -> Iterator[Metric]:
        routes = self._meter.latency.items()
        yield _histogram(
            "time_to_first_token_seconds",
            "From a request's body to the first token sent.",
            ("route",),
            {(route,): latency.first_token_s for route, latency in routes},
        )
        yield _histogram(
            "inter_token_seconds",
            "From one token to the next of the same choice.",
            ("route",),
            {(route,): latency.inter_token_s for route, latency in routes},
        )
        yield _histogram(
            "request_seconds",
            "From a request's body to the end of an answer that finished.",
            ("route",),
            {(route,): latency.request_s for route, latency in routes},
        )
        hops = self._meter.hops
        yield _histogram(
            "hop_seconds",
            "Parts of a request's way over the log, as seen here.",
            ("hop",),
            {(hop,): took_s for hop, took_s in hops.took_s.items()},
        )
        yield _histogram(
            "log_delivery_seconds",
            "From a record's storing to its being read here.",
            (),
            {(): hops.delivery_s},
        )

    # ---- the log ------------------------------------------------------------------------------------
    def _log_itself(self) -> Iterator[Metric]:
        log = self._log
        there: _Labels = {(): 1.0}
        yield _gauge("log_up", "Whether the log answers.", (), {(): float(log is not None)})
        yield _gauge(
            "log_last_sequence",
            "Position of the newest event.",
            (),
            dict.fromkeys(there, log.last_seq) if log else {},
        )
        yield _gauge(
            "log_events", "Events the log holds.", (), dict.fromkeys(there, log.messages) if log else {}
        )
        yield _gauge("log_bytes", "Bytes the log holds.", (), dict.fromkeys(there, log.bytes) if log else {})
        bound = log.max_bytes if log else None
        yield _gauge(
            "log_max_bytes",
            "Bytes the log may hold.",
            (),
            dict.fromkeys(there, bound) if bound is not None else {},
        )

    def _log_of_each_role(self) -> Iterator[Metric]:
        stats: dict[tuple[str, ...], LogStats] = {}
        if (own := self._gateway.log_stats()) is not None:
            stats["gateway", self._gateway.origin] = own
        for role, heard in (("conductor", self.conductors), ("worker", self.workers)):
            stats |= {(role, one.name): one.meters.log for one in heard if one.is_fresh and one.meters}
        labels = ("role", "name")
        yield _histogram(
            "publish_ack_seconds",
            "From handing an event over to its ack.",
            labels,
            {who: each.publish_ack_s for who, each in stats.items()},
        )
        yield _gauge(
            "unacked_events",
            "Events handed over and not acked.",
            labels,
            {who: each.unacked for who, each in stats.items()},
        )
        yield _gauge(
            "log_lag_events",
            "Events not read yet.",
            labels,
            {who: each.behind for who, each in stats.items()},
        )

    # ---- the other roles ----------------------------------------------------------------------------
    def _of_conductors(self) -> Iterator[Metric]:
        label, fresh = ("conductor",), [one for one in self.conductors if one.is_fresh]
        yield _gauge(
            "conductor_up",
            "Whether it is heard.",
            label,
            {(one.name,): one.is_fresh for one in self.conductors},
        )
        yield _gauge(
            "conductor_leading",
            "Whether it decides.",
            label,
            {(one.name,): one.state == "leading" for one in fresh},
        )
        for fact, name, help_ in _CONDUCTOR_FACTS:
            yield _gauge(f"conductor_{name}", help_, label, {(one.name,): one.number(fact) for one in fresh})
        counted = {(one.name,): one.meters for one in fresh if one.meters}
        yield _counter(
            "conductor_folded_events",
            "Events it has folded.",
            label,
            {who: each.folded for who, each in counted.items()},
        )
        yield _counter(
            "conductor_decisions",
            "Decisions it has published.",
            label,
            {who: each.decisions for who, each in counted.items()},
        )

    def _of_workers(self) -> Iterator[Metric]:
        label, fresh = ("rank",), [one for one in self.workers if one.is_fresh]
        up: dict[tuple[str, ...], float] = {(str(rank),): 0 for rank in self._gateway.served.ranks}
        yield _gauge(
            "worker_up",
            "Whether it is heard.",
            label,
            up | {(one.name,): one.is_fresh for one in self.workers},
        )
        yield _gauge(
            "worker_ready",
            "Whether it takes orders.",
            label,
            {(one.name,): one.state == "ready" for one in fresh},
        )
        for fact, name, help_ in _WORKER_FACTS:
            yield _gauge(f"worker_{name}", help_, label, {(one.name,): one.number(fact) for one in fresh})
        kernels: _Labels = {
            (one.name, str(one.facts["kernels"])): 1 for one in fresh if one.facts.get("kernels")
        }
        yield _gauge("worker_info", "Who computes its model's layers.", ("rank", "kernels"), kernels)
        yield _counter(
            "worker_steps", "Engine steps.", label, {(one.name,): one.number("steps") for one in fresh}
        )
        counted: dict[tuple[str, ...], WorkerMeters] = {
            (one.name,): one.meters for one in fresh if one.meters
        }
        yield _counter(
            "worker_sequences",
            "Sequences the engine has taken.",
            label,
            {who: each.sequences for who, each in counted.items()},
        )
        computed = {(*who, "computed"): each.computed_tokens for who, each in counted.items()}
        sampled = {(*who, "sampled"): each.sampled_tokens for who, each in counted.items()}
        yield _counter(
            "worker_tokens",
            "Tokens run through the model, and tokens that came out.",
            ("rank", "kind"),
            computed | sampled,
        )
        yield _histogram(
            "worker_step_seconds",
            "What a step took.",
            label,
            {who: each.step_s for who, each in counted.items()},
        )
        yield _histogram(
            "worker_batch_rows",
            "Sequences in a step.",
            label,
            {who: each.batch_rows for who, each in counted.items()},
        )
        yield from _of_tensors({who: each.tensors for who, each in counted.items()})
        yield from _of_edges({who: each.edges for who, each in counted.items()})
        yield from _of_prefixes({who: each.prefix for who, each in counted.items()})


_CONDUCTOR_FACTS: Final = (
    ("epoch", "epoch", "The epoch in force, as it knows."),
    ("open", "open_requests", "Requests that have not ended."),
    ("waiting", "waiting_requests", "Requests that are not admitted yet."),
)
_WORKER_FACTS: Final = (
    ("incarnation", "incarnation", "The log's position at which its life began."),
    ("progress", "load_progress", "How much of the model is loaded, from 0 to 1."),
    ("running", "running_sequences", "Sequences in the engine's batch."),
    ("waiting", "waiting_sequences", "Sequences that wait for room in it."),
    ("kv_used", "kv_used_tokens", "KV cache in use, reserved included."),
    ("kv_total", "kv_total_tokens", "KV cache there is."),
)


_TENSOR_GAUGES: Final = (
    ("total_bytes", "arena_bytes", "Memory for tensors that others may read."),
    ("free_bytes", "free_bytes", "What of it is free."),
    ("slots", "slots", "Tensors in it."),
)
_TENSOR_KINDS: Final = (("puts", "put"), ("gets", "got"), ("gone", "gone"), ("refused", "refused"))
_EDGE_GAUGES: Final = (
    ("early", "early_edges", "Events from other ranks that wait for their order."),
    ("early_bytes", "early_edge_bytes", "How large those are."),
)
_EDGE_COUNTERS: Final = (
    ("items", "stream_items", "Items of streams it made."),
    ("chunks", "stream_chunks", "Chunks of streams it took."),
)


_PREFIX_KINDS: Final = (("asked", "asked"), ("hit", "hit"))
_GUESS_KINDS: Final = (("guessed", "guessed"), ("stood", "stood"))


def _of_prefixes(counted: Mapping[tuple[str, ...], PrefixMeters]) -> Iterator[Metric]:
    yield _counter(
        "worker_prefix_tokens",
        "Tokens of sequences that were let in, and those of them that were cached.",
        ("rank", "kind"),
        _by_kind(counted, _PREFIX_KINDS),
    )
    yield _gauge(
        "worker_kv_kept_tokens",
        "KV cache that is kept for others and in no use.",
        ("rank",),
        _each(counted, "kept"),
    )
    yield _counter(
        "worker_preemptions",
        "Sequences that gave their KV cache back, to go on later.",
        ("rank",),
        _each(counted, "preempted"),
    )
    yield _counter(
        "worker_guesses",
        "Tokens that were guessed ahead, and those of them that were the model's own.",
        ("rank", "kind"),
        _by_kind(counted, _GUESS_KINDS),
    )


def _of_tensors(counted: Mapping[tuple[str, ...], TensorMeters]) -> Iterator[Metric]:
    for field, name, help_ in _TENSOR_GAUGES:
        yield _gauge(f"worker_tensor_{name}", help_, ("rank",), _each(counted, field))
    yield _counter(
        "worker_tensors",
        "Tensors put, looked at, not there any more, and refused.",
        ("rank", "kind"),
        _by_kind(counted, _TENSOR_KINDS),
    )
    yield _counter(
        "worker_tensor_fetched_bytes", "Read from other workers.", ("rank",), _each(counted, "fetched_bytes")
    )


def _of_edges(counted: Mapping[tuple[str, ...], EdgeMeters]) -> Iterator[Metric]:
    yield _counter(
        "worker_edges",
        "Events for other ranks, and from them.",
        ("rank", "direction"),
        _by_kind(counted, (("told", "told"), ("heard", "heard"))),
    )
    for field, name, help_ in _EDGE_GAUGES:
        yield _gauge(f"worker_{name}", help_, ("rank",), _each(counted, field))
    for field, name, help_ in _EDGE_COUNTERS:
        yield _counter(f"worker_{name}", help_, ("rank",), _each(counted, field))


def _each(counted: Mapping[tuple[str, ...], TensorMeters | EdgeMeters | PrefixMeters], field: str) -> _Labels:
    """One of their numbers, for each rank."""
    return {who: getattr(meters, field) for who, meters in counted.items()}


def _by_kind(
    counted: Mapping[tuple[str, ...], TensorMeters | EdgeMeters | PrefixMeters],
    kinds: Sequence[tuple[str, str]],
) -> _Labels:
    """Several of their numbers, for each rank, told apart by a label."""
    return {(*who, kind): getattr(meters, field) for who, meters in counted.items() for field, kind in kinds}


def as_json(gateway: Gateway, snapshot: Snapshot) -> dict[str, Any]:
    """The few numbers of `/metrics.json`."""
    fresh = [one for one in snapshot.workers if one.is_fresh]
    inflight = [int(one.number("running") + one.number("waiting")) for one in fresh]
    prefixes = [one.meters.prefix for one in fresh if one.meters]
    hit = sum(one.hit for one in prefixes)
    missed = sum(one.asked for one in prefixes) - hit
    recent = gateway.meter.recent
    rates = [tokens / took_s for took_s, tokens in recent if took_s > 0]
    return {
        "scheduler": SCHEDULER,
        "pool_size": len(fresh),
        "inflight_total": sum(inflight),
        "inflight_per_engine": inflight,
        # In tokens. A prompt is never found whole: behind its last token the next one is sampled.
        "cache": {"prefill_hits": 0, "prefill_misses": missed, "prefix_hits": hit, "prefix_misses": missed},
        "avg_latency_s": sum(took_s for took_s, _ in recent) / len(recent) if recent else 0.0,
        "avg_throughput_tok_s": sum(rates) / len(rates) if rates else 0.0,
    }


def _heard(name: str, beat: Beat, kind: type[_Meters], *, is_fresh: bool) -> Heard:
    try:
        meters = msgspec.convert(beat.facts.get("meters"), kind)
    except msgspec.ValidationError:
        meters = None
    return Heard(name=name, is_fresh=is_fresh, state=beat.state, facts=beat.facts, meters=meters)


@cache
def _version() -> str:
    return version("dalsegno")


def _gauge(name: str, help_: str, labels: Sequence[str], values: _Labels) -> Metric:
    return _filled(GaugeMetricFamily(f"dalsegno_{name}", help_, labels=labels), values)


def _counter(name: str, help_: str, labels: Sequence[str], values: _Labels) -> Metric:
    return _filled(CounterMetricFamily(f"dalsegno_{name}", help_, labels=labels), values)


def _filled(
    family: GaugeMetricFamily | CounterMetricFamily, values: _Labels
) -> GaugeMetricFamily | CounterMetricFamily:
    for label_values, value in values.items():
        family.add_metric(label_values, value)
    return family


def _histogram(
    name: str, help_: str, labels: Sequence[str], values: Mapping[tuple[str, ...], Histogram]
) -> Metric:
    family = HistogramMetricFamily(f"dalsegno_{name}", help_, labels=labels)
    for label_values, histogram in values.items():
        bounds = [*(f"{bound:g}" for bound in histogram.bounds), "+Inf"]
        buckets = list(zip(bounds, map(float, accumulate(histogram.counts)), strict=True))
        family.add_metric(label_values, buckets, histogram.sum)
    return family
