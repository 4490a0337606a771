"""`/metrics`: one scrape shows the gateway, the log, and every process by its last heartbeat."""

import asyncio

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.operations.metric_families import DEPRECATED
from gateway.operations.metrics import Snapshot
from shared.events import RequestResumed, WorkerLost, encode
from shared.log.port import LogStats
from shared.meters import (
    ConductorMeters,
    EdgeMeters,
    EncoderMeters,
    PrefixMeters,
    StepMeters,
    TensorMeters,
    WorkerMeters,
)
from shared.subjects import CONDUCTOR_WRITER
from shared.telemetry.histogram import ROWS, SECONDS, Histogram
from tests.gateway.world import CHAT, Performance, World, beat, deployment, echo

CHAT_ROUTE = "/v1/chat/completions"


def series(page: str) -> dict[str, float]:
    """Every sample by its name and labels, as exposed."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


async def scraped(client: httpx.AsyncClient) -> dict[str, float]:
    response = await client.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain; version=")
    return series(response.text)


def worker_beat(world: World, *, sequences: int = 4, steps: int = 9, **facts: object) -> None:
    rows, step_s = Histogram.over(ROWS), Histogram.over(SECONDS)
    rows.observe(3, times=steps)
    step_s.observe(0.02, times=steps)
    denoiser = StepMeters(runs=5, gain=2.5)
    denoiser.calls.observe(4, times=steps)
    denoiser.step_s.observe(0.03, times=steps)
    meters = WorkerMeters(
        log=LogStats(unacked=2),
        sequences=sequences,
        computed_tokens=40,
        sampled_tokens=24,
        batch_rows=rows,
        step_s=step_s,
        tensors=TensorMeters(
            total_bytes=4096,
            free_bytes=1024,
            slots=2,
            puts=12,
            gets=11,
            gone=1,
            refused=3,
            fetched_bytes=512,
        ),
        edges=EdgeMeters(told=6, heard=5, early=2, early_bytes=70, items=28, chunks=4),
        encoders=EncoderMeters(hits=7, misses=3, nbytes=4096),
        stepped={"denoiser": denoiser},
        prefix=PrefixMeters(asked=90, hit=64, kept=32, preempted=1, guessed=8, stood=6),
    )
    numbers = {"incarnation": 2, "progress": 1.0, "kv_used": 64, "kv_total": 512, "running": 3, "waiting": 1}
    beat(world, "worker", "0", "ready", steps=steps, meters=meters, **numbers, **facts)


async def test_an_answer_is_counted_and_timed() -> None:
    async with deployment() as world:
        response = await world.client.post(CHAT_ROUTE, json=CHAT)
        found = await scraped(world.client)

    assert response.status_code == 200
    assert found[f"dalsegno_requests_total{{outcome=finished,route={CHAT_ROUTE}}}"] == 1
    assert found["dalsegno_prompt_tokens_total"] == 7
    assert found["dalsegno_generated_tokens_total"] == 4
    for name in ("time_to_first_token_seconds", "request_seconds"):
        assert found[f"dalsegno_{name}_count{{route={CHAT_ROUTE}}}"] == 1
        assert found[f"dalsegno_{name}_bucket{{le=+Inf,route={CHAT_ROUTE}}}"] == 1
        assert found[f"dalsegno_{name}_sum{{route={CHAT_ROUTE}}}"] > 0
    assert found[f"dalsegno_inter_token_seconds_count{{route={CHAT_ROUTE}}}"] == 3
    assert found[f"dalsegno_http_requests_total{{method=POST,route={CHAT_ROUTE},status=200}}"] == 1


async def test_what_was_survived_is_counted() -> None:
    body = CHAT | {"stream": True, "request_id": "mine"}
    async with deployment() as world:
        await world.client.post(CHAT_ROUTE, json=body)
        before = await scraped(world.client)
        await world.client.post(CHAT_ROUTE, json=body, headers={"last-event-id": "0"})
        resumed = RequestResumed(
            writer=CONDUCTOR_WRITER, epoch=1, request_id="other", placement={}, reason="w0 is back"
        )
        world.server.append(world.subjects.walk("other"), encode(resumed))
        lost = WorkerLost(writer=CONDUCTOR_WRITER, epoch=1, rank=0, incarnation=1, reason="silent")
        world.server.append(world.subjects.lost, encode(lost))
        meter = world.gateway.meter
        await world.until(lambda: bool(meter.workers_lost))
        found = await scraped(world.client)

    names = (
        f"answers_resumed_total{{route={CHAT_ROUTE}}}",
        "requests_resumed_total",
        "workers_lost_total{rank=0}",
    )
    assert [before[f"dalsegno_{name}"] for name in names] == [0, 0, 0]
    assert [found[f"dalsegno_{name}"] for name in names] == [1, 1, 1]


async def test_failures_are_counted_by_their_code() -> None:
    async with deployment() as world:
        refused = await world.client.post(CHAT_ROUTE, json=CHAT | {"model": "another"})
        nowhere = await world.client.get("/etc/passwd")
        found = await scraped(world.client)

    assert (refused.status_code, nowhere.status_code) == (404, 404)
    assert found[f"dalsegno_http_requests_total{{method=POST,route={CHAT_ROUTE},status=404}}"] == 1
    assert found["dalsegno_http_requests_total{method=GET,route=other,status=404}"] == 1


async def test_what_runs_is_in_flight() -> None:
    going_on = asyncio.Event()

    async def slow(performance: Performance) -> None:
        await going_on.wait()
        await echo(performance)

    async with deployment(slow) as world, asyncio.TaskGroup() as tasks:
        tasks.create_task(world.client.post(CHAT_ROUTE, json=CHAT))
        await world.performance()
        during = await scraped(world.client)
        going_on.set()
    assert during["dalsegno_requests_in_flight"] == 1


async def test_the_hops_of_a_request_are_timed_by_its_records() -> None:
    async with deployment() as world:
        await world.client.post(CHAT_ROUTE, json=CHAT)
        found = await scraped(world.client)

    assert found["dalsegno_hop_seconds_count{hop=first_chunk}"] == 1
    assert found["dalsegno_hop_seconds_count{hop=finished}"] == 1
    assert found["dalsegno_log_delivery_seconds_count"] == 6  # the admission, four words, and the end


async def test_the_log_is_shown_as_it_answers() -> None:
    async with deployment() as world:
        await world.client.post(CHAT_ROUTE, json=CHAT)
        found = await scraped(world.client)
        stored = len(world.server.records)
        world.server.stop()
        away = await scraped(world.client)

    assert (found["dalsegno_log_up"], found["dalsegno_log_last_sequence"]) == (1, stored)
    assert found[f"dalsegno_publish_ack_seconds_count{{name={world.gateway.origin},role=gateway}}"] == 1
    assert found[f"dalsegno_log_lag_events{{name={world.gateway.origin},role=gateway}}"] == 0
    assert away["dalsegno_log_up"] == 0
    assert "dalsegno_log_last_sequence" not in away


async def test_a_worker_is_shown_as_it_said_last() -> None:
    async with deployment() as world:
        worker_beat(world)
        found = await scraped(world.client)

    assert {name: found[f"dalsegno_worker_{name}{{rank=0}}"] for name in (
        "up", "ready", "incarnation", "load_progress", "running_sequences", "waiting_sequences",
        "kv_used_tokens", "kv_total_tokens", "steps_total", "sequences_total",
    )} == {
        "up": 1, "ready": 1, "incarnation": 2, "load_progress": 1, "running_sequences": 3,
        "waiting_sequences": 1, "kv_used_tokens": 64, "kv_total_tokens": 512, "steps_total": 9,
        "sequences_total": 4,
    }  # fmt: skip
    assert found["dalsegno_worker_tokens_total{kind=computed,rank=0}"] == 40
    assert found["dalsegno_worker_prefix_cache_tokens_total{kind=queries,rank=0}"] == 90
    assert found["dalsegno_worker_prefix_cache_tokens_total{kind=hits,rank=0}"] == 64
    assert found["dalsegno_worker_encoder_cache_lookups_total{kind=hits,rank=0}"] == 7
    assert found["dalsegno_worker_encoder_cache_lookups_total{kind=misses,rank=0}"] == 3
    assert found["dalsegno_worker_encoder_cache_bytes{rank=0}"] == 4096
    assert found["dalsegno_worker_node_runs{node=denoiser,rank=0}"] == 5
    assert found["dalsegno_worker_node_step_runs_sum{node=denoiser,rank=0}"] == 36
    assert found["dalsegno_worker_node_step_seconds_count{node=denoiser,rank=0}"] == 9
    assert found["dalsegno_worker_node_batch_gain{node=denoiser,rank=0}"] == 2.5
    assert found["dalsegno_worker_kv_kept_tokens{rank=0}"] == 32
    assert found["dalsegno_worker_preemptions_total{rank=0}"] == 1
    assert found["dalsegno_worker_speculative_tokens_total{kind=drafted,rank=0}"] == 8
    assert found["dalsegno_worker_speculative_tokens_total{kind=accepted,rank=0}"] == 6
    assert found["dalsegno_worker_tokens_total{kind=sampled,rank=0}"] == 24
    assert found["dalsegno_worker_batch_sequences_sum{rank=0}"] == 27
    assert found["dalsegno_worker_batch_sequences_bucket{le=2,rank=0}"] == 0
    assert found["dalsegno_worker_batch_sequences_bucket{le=4,rank=0}"] == 9
    assert found["dalsegno_worker_step_seconds_count{rank=0}"] == 9
    assert found["dalsegno_unacked_events{name=0,role=worker}"] == 2


async def test_every_deprecated_metric_equals_the_one_that_its_help_names() -> None:
    async with deployment() as world:
        worker_beat(world)
        page = (await world.client.get("/metrics")).text
    families = {family.name: family for family in text_string_to_metric_families(page)}
    prefix = "Deprecated: use "
    deprecated = {
        name: family for name, family in families.items() if family.documentation.startswith(prefix)
    }

    assert set(deprecated) == {f"dalsegno_{old.name}" for old in DEPRECATED.values()}
    for name, family in deprecated.items():
        new = families[family.documentation.removeprefix(prefix).removesuffix(".").removesuffix("_total")]
        old_values = DEPRECATED[new.name.removeprefix("dalsegno_")].label_values
        assert family.type == new.type
        assert sum(sample.value for sample in family.samples) > 0
        assert [
            (
                sample.name.replace(new.name, name, 1),
                {label: old_values.get(value, value) for label, value in sample.labels.items()},
                sample.value,
            )
            for sample in new.samples
        ] == [(sample.name, sample.labels, sample.value) for sample in family.samples]


@pytest.mark.parametrize(
    ("series", "value"),
    [
        ("prefix_tokens_total{kind=asked,rank=0}", 90), ("prefix_tokens_total{kind=hit,rank=0}", 64),
        ("guesses_total{kind=guessed,rank=0}", 8), ("guesses_total{kind=stood,rank=0}", 6),
        ("batch_rows_sum{rank=0}", 27), ("batch_rows_bucket{le=2,rank=0}", 0),
        ("batch_rows_bucket{le=4,rank=0}", 9),
        ("edges_total{direction=told,rank=0}", 6), ("edges_total{direction=heard,rank=0}", 5),
        ("early_edges{rank=0}", 2), ("early_edge_bytes{rank=0}", 70),
    ],
)  # fmt: skip
async def test_the_old_names_of_series_are_exposed_for_one_version(series: str, value: float) -> None:
    async with deployment() as world:
        worker_beat(world)
        assert (await scraped(world.client))[f"dalsegno_worker_{series}"] == value


async def test_who_computes_is_shown_once_it_is_known() -> None:
    async with deployment() as world:
        beat(world, "worker", "0", "loading", kernels="")
        loading = await scraped(world.client)
        beat(world, "worker", "0", "ready", kernels="avx512")
        found = await scraped(world.client)

    assert not [name for name in loading if name.startswith("dalsegno_worker_info")]
    assert found["dalsegno_worker_info{kernels=avx512,rank=0}"] == 1


async def test_what_a_worker_says_of_tensors_and_edges_is_shown_to_the_last_number() -> None:
    async with deployment() as world:
        worker_beat(world)
        found = await scraped(world.client)

    shown = {name.removeprefix("dalsegno_worker_"): number for name, number in found.items()}
    said = {
        name: shown[name] for name in shown if name.startswith(("tensor", "edge_", "out_of_order", "stream"))
    }
    assert said == {
        "tensor_arena_bytes{rank=0}": 4096,
        "tensor_free_bytes{rank=0}": 1024,
        "tensor_slots{rank=0}": 2,
        "tensors_total{kind=put,rank=0}": 12,
        "tensors_total{kind=got,rank=0}": 11,
        "tensors_total{kind=gone,rank=0}": 1,
        "tensors_total{kind=refused,rank=0}": 3,
        "tensor_fetched_bytes_total{rank=0}": 512,
        "edge_events_total{direction=sent,rank=0}": 6,
        "edge_events_total{direction=received,rank=0}": 5,
        "out_of_order_edges{rank=0}": 2,
        "out_of_order_edge_bytes{rank=0}": 70,
        "stream_items_total{rank=0}": 28,
        "stream_chunks_total{rank=0}": 4,
    }
    assert len(said) == len(TensorMeters.__struct_fields__) + len(EdgeMeters.__struct_fields__)


async def test_a_conductor_is_shown_as_it_said_last() -> None:
    async with deployment() as world:
        meters = ConductorMeters(log=LogStats(behind=5), folded=70, decisions=20)
        beat(world, "conductor", "c-1", "leading", epoch=4, open=3, waiting=2, meters=meters)
        found = await scraped(world.client)

    assert {name: found[f"dalsegno_conductor_{name}{{conductor=c-1}}"] for name in (
        "up", "leading", "epoch", "open_requests", "waiting_requests",
        "folded_events_total", "decisions_total",
    )} == {
        "up": 1, "leading": 1, "epoch": 4, "open_requests": 3, "waiting_requests": 2,
        "folded_events_total": 70, "decisions_total": 20,
    }  # fmt: skip
    assert found["dalsegno_log_lag_events{name=c-1,role=conductor}"] == 5


async def test_of_a_role_that_is_silent_only_that_is_shown() -> None:
    async with deployment() as world:
        worker_beat(world)
        later = Snapshot(world.gateway, None, asyncio.get_running_loop().time() + 60.0)
        samples = [sample for family in later.collect() for sample in family.samples]

    said = {(sample.name, sample.value) for sample in samples if sample.labels.get("rank") == "0"}
    assert said == {("dalsegno_worker_up", 0.0), ("dalsegno_workers_lost_total", 0)}  # counted from the log
    assert not [sample for sample in samples if sample.labels.get("role") == "worker"]


async def test_a_worker_that_was_never_heard_is_down() -> None:
    async with deployment() as world:
        assert (await scraped(world.client))["dalsegno_worker_up{rank=0}"] == 0


@pytest.mark.parametrize("meters", [None, 7, {"log": {}}, {"sequences": "many"}])
async def test_a_beat_of_another_version_shows_what_can_be_read(meters: object) -> None:
    async with deployment() as world:
        beat(world, "worker", "0", "ready", steps=9, running="two", meters=meters)
        found = await scraped(world.client)

    assert found["dalsegno_worker_steps_total{rank=0}"] == 9
    assert found["dalsegno_worker_running_sequences{rank=0}"] == 0
    assert "dalsegno_worker_sequences_total{rank=0}" not in found


async def test_two_gateways_in_one_process_count_apart() -> None:
    async with deployment() as one, deployment() as other:
        await one.client.post(CHAT_ROUTE, json=CHAT)

        assert (await scraped(one.client))["dalsegno_generated_tokens_total"] == 4
        assert (await scraped(other.client))["dalsegno_generated_tokens_total"] == 0


async def test_openmetrics_is_given_to_who_asks_for_it() -> None:
    async with deployment() as world:
        response = await world.client.get("/metrics", headers={"accept": "application/openmetrics-text"})

    assert response.headers["content-type"].startswith("application/openmetrics-text")
    assert response.text.endswith("# EOF\n")


async def test_the_json_has_the_engines_and_the_averages() -> None:
    async with deployment() as world:
        empty = (await world.client.get("/metrics.json")).json()
        worker_beat(world)
        await world.client.post(CHAT_ROUTE, json=CHAT)
        found = (await world.client.get("/metrics.json")).json()

    assert empty == {
        "scheduler": "priority",
        "pool_size": 0,
        "inflight_total": 0,
        "inflight_per_engine": [],
        "cache": {"prefill_hits": 0, "prefill_misses": 0, "prefix_hits": 0, "prefix_misses": 0},
        "avg_latency_s": 0.0,
        "avg_throughput_tok_s": 0.0,
    }
    assert (found["pool_size"], found["inflight_total"], found["inflight_per_engine"]) == (1, 4, [4])
    assert found["cache"] == {"prefill_hits": 0, "prefill_misses": 26, "prefix_hits": 64, "prefix_misses": 26}
    assert found["avg_throughput_tok_s"] == pytest.approx(4 / found["avg_latency_s"])
