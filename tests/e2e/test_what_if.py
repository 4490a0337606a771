"""Another configuration, asked of a real deployment's log."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from shared.events import RequestFinished
from tests.e2e import clients, deploy
from tests.e2e.clients import Answer, Ended
from tests.tiny import tiny_checkpoint

pytestmark = pytest.mark.timeout(300)
AT_ONCE = 6
LONG: dict[str, Any] = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}


def answer_of(ended: Ended) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data dir at rest: `AT_ONCE` requests ran at once, then some more."""
    folder = tmp_path_factory.mktemp("what-if")

    async def ask(running: deploy.Running) -> None:
        async with clients.http(running) as http, clients.reader(running) as reader:
            first = [Answer(f"r{number}", awaited_tokens=2) for number in range(AT_ONCE)]
            async with asyncio.TaskGroup() as tasks:
                for answer in first:
                    tasks.create_task(clients.generate(http, answer, answer.request_id, **LONG))
                    await answer.under_way.wait()
            await clients.answers(http, ["more"] * 8, "more", at_once=4, **LONG)
            for name in (*(one.request_id for one in first), *(f"more-{number}" for number in range(8))):
                await reader.until(reader.subjects.walk(name), RequestFinished)

    with deploy.serve(
        folder, "--set", "model_kwargs.max_sequences=4", model=str(tiny_checkpoint("qwen3"))
    ) as running:
        asyncio.run(ask(running))
    return running.data_dir


def test_fewer_places_name_the_requests_that_wait_and_those_before_them(data_dir: Path) -> None:
    ended = clients.run("what-if", str(data_dir), "--set", "max_concurrent_requests=1", "--json")
    assert ended.returncode == 0, ended.stderr
    found = answer_of(ended)
    later = {one["request_id"]: one for one in found["changes"] if one["kind"] == "later"}
    assert found["requests"] == AT_ONCE + 8
    assert later["r1"]["behind"] == ["r0"]
    assert later["r1"]["seconds"] > 0
    assert "r0" not in later
    lines = clients.run("what-if", str(data_dir), "--set", "max_concurrent_requests=1").stdout
    assert "would have waited behind 1 running (r0): max_concurrent_requests is 1, and 1 ran" in lines


def test_the_recorded_values_change_nothing(data_dir: Path) -> None:
    ended = clients.run("what-if", str(data_dir), "--set", "max_concurrent_requests=256", "--json")
    found = answer_of(ended)
    assert (found["affected"], found["changes"]) == (0, [])
    assert found["decided"] >= AT_ONCE + 8


def test_times_say_their_calibration_or_that_there_is_none(data_dir: Path) -> None:
    """Whether the simulation is close enough depends on how busy this machine is."""
    ended = clients.run(
        "what-if", str(data_dir), "--set", "model_kwargs.max_sequences=1", "--level", "times", "--json"
    )
    found = answer_of(ended)
    errors = [
        found["calibration"][name]["error"] for name in ("latency p50, s", "latency p90, s", "throughput")
    ]
    if ended.returncode == 3:
        assert max(errors) > 0.1
        assert found["cannot"].startswith("not calibrated")
        return
    assert ended.returncode == 0, ended.stderr
    assert max(errors) <= 0.1
    assert found["outcomes"]["simulated"] == {"finished": AT_ONCE + 8}
    predicted = found["predicted"]["latency p50, s"]
    assert 0 < predicted["low"] <= predicted["value"] <= predicted["high"]


def test_a_trace_of_the_log_is_simulated_with_its_costs(data_dir: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    ended = clients.run(
        "export", "--all", "--format", "mooncake", "-o", str(trace), "--data-dir", str(data_dir)
    )
    assert ended.returncode == 0, ended.stderr
    calls = [json.loads(line) for line in trace.read_text().splitlines()]
    assert len(calls) == AT_ONCE + 8
    assert {one["output_length"] for one in calls} == {40}
    change = ("--set", "max_concurrent_requests=1")
    ended = clients.run(
        "what-if", str(trace), *change, "--level", "times", "--cost-from", str(data_dir), "--json"
    )
    assert ended.returncode in {0, 3}, ended.stderr
    found = answer_of(ended)
    assert found.get("count", len(calls)) == len(calls)
    ended = clients.run("what-if", str(trace), *change, "--cost-from", str(data_dir))
    assert ended.returncode == 2
    assert "--level times" in ended.stderr


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("gateway.port=1", "none depends on gateway.*"),
        ("checkpoint=/elsewhere", "another model or machine"),
        ("max_concurrent=1", "max_concurrent_requests"),
        ("max_concurrent_requests=0", ">= 1"),
    ],
)
def test_a_key_on_which_nothing_depends_is_wrong_usage(data_dir: Path, change: str, says: str) -> None:
    ended = clients.run("what-if", str(data_dir), "--set", change)
    assert ended.returncode == 2
    assert says in ended.stderr


def test_a_bundle_has_no_times(data_dir: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "r0.bundle"
    exported = clients.run("export", "r0", "--data-dir", str(data_dir), "-o", str(bundle))
    assert exported.returncode == 0, exported.stderr
    ended = clients.run("what-if", str(bundle), "--set", "max_concurrent_requests=1", "--level", "times")
    assert ended.returncode == 3
    assert "times need a log" in ended.stderr
    ended = clients.run("what-if", str(bundle), "--set", "max_attempts=7")
    assert ended.returncode == 0
    assert "limits.max_attempts (default) -> 7" in ended.stdout
