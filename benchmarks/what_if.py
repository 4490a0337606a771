"""Times that `what-if` predicts for another configuration, compared with a real run of it.

One trace is submitted to deployments of the demo, with the recorded and with the changed value. The
prediction is made from the log of the first one only. A ratio of 1.00 is a perfect prediction. The first
figures are the error of the simulation on the recorded run, above 10 % of which `what-if` refuses to predict.
"""

import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, Final

from benchmarks.report import RATIO, Figure
from dalsegno.history.log_source import LogSource
from dalsegno.replay import trace_load
from dalsegno.traces.calls import Call, Trace
from tests.e2e.deploy import serve

RUNS: Final = 3
"""Real runs of the changed value: the median counts, and their spread says how well it can be predicted."""
REQUESTS: Final = 150
PER_S: Final = 40.0
CHANGES: Final = {
    "max_concurrent_requests": (16, 3),
    "model_kwargs.max_sequences": (16, 4),
}
"""By key: the recorded value, and the other one."""
_MEASURES: Final = ("latency p50, s", "latency p90, s", "throughput")


def measure() -> list[Figure]:
    return [figure for key, values in CHANGES.items() for figure in _compared(key, *values)]


def _compared(key: str, recorded: int, changed: int) -> Iterator[Figure]:
    with tempfile.TemporaryDirectory(prefix="dalsegno-bench-") as folder:
        before = _run(Path(folder, "recorded"), f"{key}={recorded}")
        asked = _what_if(before, f"{key}={changed}")
        after = [_run(Path(folder, f"changed-{number}"), f"{key}={changed}") for number in range(RUNS)]
        real = [_what_if(one, f"{key}={changed}")["calibration"] for one in after]
    what = f"{key} {recorded} -> {changed}"
    for name in _MEASURES:
        error = asked["calibration"][name]["error"]
        yield Figure(f"{what}: calibration, {name}", 100 * error, "%", "of the recorded run")
    if "predicted" not in asked:
        print(f"{what}: {asked['cannot']}")
        return
    for name in _MEASURES:
        predicted, was = asked["predicted"][name], asked["calibration"][name]["recorded"]
        if predicted["value"] is None:
            continue
        found = [one[name]["recorded"] for one in real]
        note = (
            f"{predicted['value']:.3g} predicted ({predicted['low']:.3g} to {predicted['high']:.3g}), "
            f"{median(found):.3g} measured ({min(found):.3g} to {max(found):.3g}), {was:.3g} before"
        )
        yield Figure(f"{what}: predicted / measured, {name}", predicted["value"] / median(found), RATIO, note)


def _run(folder: Path, setting: str) -> Path:
    """Submit the trace to a deployment with this setting; return its data dir."""
    folder.mkdir()
    with serve(folder, "--set", setting, model="demo") as running:
        replies = asyncio.run(trace_load.submit(_trace(), LogSource(data_dir=running.data_dir), 1.0))
    assert all(reply.outcome == "finished" for reply in replies)
    return running.data_dir


def _trace() -> Trace:
    draw, at_ms, calls = Random(0), 0.0, []
    for number in range(REQUESTS):
        length, tokens = draw.randint(16, 96), draw.randint(16, 96)
        calls.append(Call(timestamp=at_ms, input_length=length, output_length=tokens, hash_ids=[number]))
        at_ms += draw.expovariate(PER_S) * 1e3
    return Trace(name="made", form="mooncake", calls=list(calls))


def _what_if(data_dir: Path, setting: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "dalsegno", "what-if", str(data_dir)]
    options = ["--set", setting, "--level", "times", "--json"]
    ended = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    assert ended.returncode in {0, 3}, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout)
    return found
