"""The operations page, the dashboard and the served metrics match; a request leaves one trace."""

import asyncio
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import yaml
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from dalsegno.config import environment
from shared.events import RequestFinished
from shared.subjects import Subjects
from shared.telemetry.settings import TraceSettings
from tests.collector import Collected, Collector, collecting
from tests.e2e import clients
from tests.e2e.deploy import Running, serve
from tests.e2e.pages import blocks, named, rows, sessions

PAGE: Final = (clients.ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
DEPLOY: Final = clients.ROOT / "deploy"
CHAT: Final = {"model": "demo", "messages": [{"role": "user", "content": "What does len do?"}]}
AT_REST: Final = {
    "dalsegno_answers_resumed",
    "dalsegno_requests_resumed",
    "dalsegno_workers_lost",
    "dalsegno_requests_in_flight",
    "dalsegno_unacked_events",
    "dalsegno_log_lag_events",
    "dalsegno_conductor_open_requests",
    "dalsegno_conductor_waiting_requests",
    "dalsegno_conductor_ended_readers",
    "dalsegno_worker_running_sequences",
    "dalsegno_worker_waiting_sequences",
    "dalsegno_worker_kv_used_tokens",
    "dalsegno_worker_kv_kept_tokens",
    "dalsegno_worker_waiting_guides",
    "dalsegno_worker_refused_guides",
    "dalsegno_worker_encoder_cache_bytes",
    "dalsegno_worker_encoder_cache_lookups",
    "dalsegno_worker_guide_cpu_seconds",
    "dalsegno_worker_preemptions",
    "dalsegno_worker_guesses",
    "dalsegno_diffusion_forwards",
    "dalsegno_diffusion_tokens",
    "dalsegno_worker_speculative_tokens",
}
"""Of what is under way now, was survived, or is crowded, or long enough to be kept: 0 when nothing is."""
BETWEEN_RANKS: Final = {
    "dalsegno_worker_tensor_slots",
    "dalsegno_worker_tensors",
    "dalsegno_worker_tensor_fetched_bytes",
    "dalsegno_worker_edges",
    "dalsegno_worker_early_edges",
    "dalsegno_worker_early_edge_bytes",
    "dalsegno_worker_edge_events",
    "dalsegno_worker_out_of_order_edges",
    "dalsegno_worker_out_of_order_edge_bytes",
    "dalsegno_worker_stream_items",
    "dalsegno_worker_stream_chunks",
}
"""0 where a text model is on one rank: nobody is told anything, and nothing is put where others read it."""
OF_NODES_IN_STEPS: Final = {
    "dalsegno_worker_node_runs",
    "dalsegno_worker_node_step_seconds",
    "dalsegno_worker_node_step_runs",
    "dalsegno_worker_node_batch_gain",
}
"""Without a sample where no node runs in steps; `tests/gateway/operations` reads their labels."""
OURS: Final = ("dalsegno_", "gen_ai_")
VARIABLE: Final = "DALSEGNO_TRACES_ENDPOINT"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def scraped(url: str) -> dict[str, Metric]:
    page = httpx.get(f"{url}/metrics", timeout=30).text
    return {family.name: family for family in text_string_to_metric_families(page)}


def exported_names(family: Metric) -> set[str]:
    """The series names in an expression."""
    suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}
    return {family.name + suffix for suffix in suffixes.get(family.type, ("",))}


@pytest.fixture(scope="module")
def families(deployment: Running) -> dict[str, Metric]:
    """A scrape after one request, once heartbeats have delivered the other roles' metrics."""
    httpx.post(f"{deployment.url}/v1/chat/completions", json=CHAT, timeout=60).raise_for_status()
    while True:  # a beat is said twice a second, and sets no event of ours
        found = scraped(deployment.url)
        if all(total(found[f"dalsegno_{name}"]) for name in ("worker_sequences", "conductor_decisions")):
            return found


def total(family: Metric) -> float:
    return sum(sample.value for sample in family.samples if not sample.name.endswith("_bucket"))


def test_the_table_is_what_is_exported(families: dict[str, Metric]) -> None:
    told = {
        name: (type_, named(labels))
        for names, type_, labels, _ in rows(PAGE, "## Series")[1:]
        for name in named(names)
    }
    ours = {name: one for name, one in told.items() if name.startswith(OURS)}
    of_the_process = set(told) - set(ours)

    assert ours == {
        f"{family.name}_total" if family.type == "counter" else family.name: (
            family.type,
            set().union(*(sample.labels for sample in family.samples)) - {"le"},
        )
        for family in families.values()
        if family.name.startswith(OURS) and family.name not in OF_NODES_IN_STEPS
    } | {name: told[name] for name in OF_NODES_IN_STEPS}
    assert {name: families[name].type for name in OF_NODES_IN_STEPS} == {
        name: told[name][0] for name in OF_NODES_IN_STEPS
    }
    assert of_the_process == {
        f"{name}_total" if families[name].type == "counter" else name
        for name in families
        if not name.startswith(OURS)
    }


def test_after_one_request_every_series_has_something_to_show(families: dict[str, Metric]) -> None:
    empty = {name for name, family in families.items() if not total(family)}

    assert empty <= AT_REST | BETWEEN_RANKS | OF_NODES_IN_STEPS


def test_the_dashboard_asks_for_what_is_exported(families: dict[str, Metric]) -> None:
    dashboard = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text(encoding="utf-8"))
    exported = set().union(*map(exported_names, families.values()))
    shown: set[str] = set()
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            asked = set(re.findall(r"\b(?:dalsegno|process)_\w+", target["expr"]))
            assert asked, panel["title"]
            assert asked <= exported, panel["title"]
            shown |= asked

    ours = {
        name: family
        for name, family in families.items()
        if name.startswith("dalsegno_") and not family.documentation.startswith("Deprecated: use ")
    }
    assert not [name for name, family in ours.items() if shown.isdisjoint(exported_names(family))]


def test_the_panels_do_not_lie_over_one_another() -> None:
    dashboard = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text(encoding="utf-8"))
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24
        assert taken.isdisjoint(cells), panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_what_alerts_ask_for_is_exported(families: dict[str, Metric]) -> None:
    exported = set().union(*map(exported_names, families.values()))
    _, *alerts = rows(PAGE.replace(r"\|", "/"), "## Alerts")

    assert len(alerts) > 5
    for expression, *_ in alerts:
        assert set(re.findall(r"\bdalsegno_\w+", expression)) <= exported


def test_prometheus_and_grafana_are_configured_as_they_are_mounted() -> None:
    def read(path: str) -> Any:
        return yaml.safe_load((DEPLOY / path).read_text(encoding="utf-8"))

    [scrape] = read("prometheus/prometheus.yml")["scrape_configs"]
    [provider] = read("grafana/dashboards/dalsegno.yml")["providers"]
    [source] = read("grafana/datasources/prometheus.yml")["datasources"]

    assert scrape["job_name"] == "dalsegno"  # the dashboard asks for the job by its name
    assert provider["options"]["path"] == "/etc/grafana/provisioning"
    assert source["type"] == "prometheus"


def test_every_command_of_the_page_gives_the_answer_shown(
    deployment: Running, families: dict[str, Metric]
) -> None:
    told = list(sessions(PAGE))
    assert told
    for command, shown in told:
        ended = subprocess.run(
            ["bash", "-c", command.replace("http://127.0.0.1:8000", deployment.url)],
            capture_output=True, text=True, check=True, timeout=60,
        )  # fmt: skip
        assert ended.stdout.strip() == shown, command


def test_the_configuration_of_the_page_is_one(tmp_path: Path) -> None:
    [shown] = blocks(PAGE, "yaml")
    assert set(yaml.safe_load(shown)["traces"]) <= set(TraceSettings.__struct_fields__)


# ---- traces ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[Running]:
    """A deployment with tracing, also of its commands."""
    with serve(tmp_path_factory.mktemp("traced"), env={VARIABLE: collector.endpoint}) as running:
        yield running


def is_whole(spans: list[Collected]) -> bool:
    """True if all processes of a request have exported their last span."""
    names = [span.name for span in spans]
    last = {"POST /v1/chat/completions", "chat demo", "decide request.finished", "walk decode"}
    return last <= set(names) and names.count("order") == 2


def test_a_request_is_one_trace_through_every_role_and_its_replay_is_none(
    traced: Running, collector: Collector
) -> None:
    sampled = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    answer = httpx.post(f"{traced.url}/v1/chat/completions", json=CHAT, headers=sampled, timeout=60).json()
    spans = collector.until(is_whole)

    by_name = {span.name: span for span in spans if span.service == "dalsegno-gateway"}
    assert set(by_name) == {"POST /v1/chat/completions", "chat demo"}
    root, answered = by_name["POST /v1/chat/completions"], by_name["chat demo"]
    assert {span.trace for span in spans} == {TRACE}
    assert (root.parent, answered.parent) == (PARENT, root.id)
    queued, admitted = answered.events
    assert (queued.name, admitted.name) == ("queued", "admitted")
    assert queued.time_ns <= admitted.time_ns
    decided = [span for span in spans if span.service == "dalsegno-conductor"]
    assert sorted(span.name for span in decided) == [
        "decide node.ready", "decide node.ready", "decide request.admitted", "decide request.finished",
    ]  # fmt: skip
    orders = [span for span in spans if span.name == "order"]
    assert {span.parent for span in (*decided, *orders)} == {answered.id}
    walks = {span.name: span for span in spans if span.name.startswith("walk ")}
    assert set(walks) == {"walk prepare", "walk prefill", "walk decode"}
    assert {span.parent for span in walks.values()} == {span.id for span in orders}
    assert walks["walk prefill"].parent == walks["walk decode"].parent
    usage = answer["usage"]
    assert walks["walk prepare"].attributes["dalsegno.prompt_tokens"] == usage["prompt_tokens"]
    assert walks["walk decode"].attributes["dalsegno.completion_tokens"] == usage["completion_tokens"]
    assert answered.attributes["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
    told = (root, answered, *decided, *orders)
    assert {span.attributes["dalsegno.request_id"] for span in told} == {answer["id"]}
    assert not [span for span in spans if span.is_error]
    assert "len" not in " ".join(str(span) for span in spans)  # the question's word

    exports = collector.exports
    replay = clients.run(
        "replay", answer["id"], "--nats", traced.nats_url, "--prefix", traced.prefix,
        env=environment.of(traced.reader) | {VARIABLE: collector.endpoint},
    )  # fmt: skip
    assert replay.returncode == 0, replay.stderr
    # Whoever would export in that process has done so by its end; the deployment has nothing more to say.
    assert collector.exports == exports


def test_a_request_over_nats_without_a_trace_has_no_spans(traced: Running, collector: Collector) -> None:
    asyncio.run(asked_over_nats(traced, "untraced"))
    marked = {"traceparent": f"00-{TRACE[::-1]}-{PARENT}-01"}
    httpx.post(f"{traced.url}/generate", json={"text": "What does abs do?"}, headers=marked, timeout=60)
    spans = collector.until(lambda spans: is_done(spans, TRACE[::-1]))

    assert {span.trace for span in spans} <= {TRACE, TRACE[::-1]}


async def asked_over_nats(running: Running, request_id: str) -> None:
    subjects = Subjects(running.prefix)
    request = {"model": "demo", "inputs": {"text": "What does len do?"}}
    async with clients.service(running) as log, clients.reader(running) as reader:
        await log.publish(subjects.request(request_id), json.dumps(request).encode())
        await reader.until(subjects.walk(request_id), RequestFinished)


def is_done(spans: list[Collected], trace: str) -> bool:
    return any(span.trace == trace and span.name == "decide request.finished" for span in spans)
