"""Traces in each format, submitted to a real deployment, and simulated with a recorded run's costs."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.dalsegno.traces.test_formats import AIPERF, BURSTGPT, MOONCAKE, SHAREGPT, VLLM, dynamo
from tests.e2e import clients
from tests.e2e.deploy import Running

pytestmark = pytest.mark.timeout(300)
SHORT = MOONCAKE.replace("1040", "40").replace("[0, 1, 2]", "[0]").replace("87", "7")
TRACES = {
    "mooncake": (SHORT + SHORT.replace("1500", "1600"), 2, 14),
    "dynamo": (dynamo(5_000, [7]) + dynamo(5_050, [7]), 2, 8),
    "burstgpt": (BURSTGPT.replace("472", "30").replace("45.5", "5.01").replace("46", "5.02"), 2, 27),
    "vllm": (VLLM, 2, None),
    "sharegpt": (SHAREGPT, 1, None),
    "aiperf": (AIPERF.replace("200", "20").replace('{"texts"', '{"timestamp": 30, "texts"'), 2, None),
}  # fmt: skip
"""By format: the trace, its requests that can be repeated, and the tokens of their answers."""


def load(running: Running, path: Path, *options: str) -> clients.Ended:
    return clients.run("replay", str(path), "--load", str(running.data_dir), *options)


@pytest.mark.parametrize("form", TRACES)
def test_a_trace_of_each_format_is_submitted(form: str, deployment: Running, tmp_path: Path) -> None:
    text, requests, tokens = TRACES[form]
    path = tmp_path / ("trace.csv" if form == "burstgpt" else "trace.jsonl")
    path.write_text(text, encoding="utf-8")
    ended = load(deployment, path, "--json", "--speed", "10")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout)
    assert (found["now"]["finished"], found["now"]["otherwise"]) == (requests, 0)
    assert found["trace"]["tokens"] == tokens
    if tokens is not None:
        assert found["now"]["tokens"] == tokens
    assert found["now"]["first chunk, p50, ms"] > 0
    assert (f"{1} request of the trace is left out" in ended.stderr) == (form in {"burstgpt", "sharegpt"})


def test_prompts_share_what_they_share_in_the_trace(deployment: Running, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    calls = [
        {"timestamp": 2000 * number, "input_length": 120, "output_length": 2, "hash_ids": [number % 2]}
        for number in range(4)
    ]
    path.write_text("\n".join(map(json.dumps, calls)))
    lines = load(deployment, path, "--speed", "20").stdout
    assert "load replay of 4 requests of a trace (mooncake) at 20 times its speed" in lines
    told = clients.run_on(deployment, "log", "--limit", "4", "--json").stdout.splitlines()
    newest = [json.loads(line)["request_id"] for line in told][-4:]
    cached = []
    for request_id in newest:
        why = json.loads(clients.run_on(deployment, "why", request_id, "--json").stdout)
        [text] = [part["text"] for part in why["parts"] if "first token" in part["text"]]
        cached.append("cached" in text)
    assert sorted(cached) == [False, False, True, True]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--rate", "5"), "times of their own"),
        (("--format", "vllm"), "line 1: Object missing required field `prompt`"),
    ],
)
def test_what_does_not_fit_a_trace_is_one_line(
    arguments: tuple[str, ...], says: str, deployment: Running, tmp_path: Path
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(SHORT)
    ended = load(deployment, path, *arguments)
    assert ended.returncode != 0
    assert says in ended.stderr
    assert "Traceback" not in ended.stderr


def test_rate_and_format_need_a_load(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(SHORT)
    ended = clients.run("replay", str(path), "--rate", "5")
    assert (ended.returncode, "--rate goes with --load" in ended.stderr) == (2, True)
    ended = clients.run("what-if", "--set", "max_concurrent_requests=1", "--format", "vllm")
    assert (ended.returncode, "--cost-from" in ended.stderr) == (2, True)
