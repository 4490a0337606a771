"""The lanes of a timeline: what each node did and waited for, whatever is lost, late or killed."""

import json
from typing import Any

import msgspec
import pytest

from dalsegno.replay import recorded_request
from dalsegno.studio.study import Study
from dalsegno.why.parts import Kind
from shared.events import NodeReady, NodeWork, RequestSubmitted
from shared.log.port import StoredRecord
from tests.conductor.script import Script
from tests.dalsegno import histories
from tests.simulation.invariants import run
from tests.simulation.simulator import Simulation


def later(records: list[StoredRecord], seq: int, seconds: float) -> list[StoredRecord]:
    """The records with those from `seq` on so much later."""
    shift_ns = round(seconds * 1e9)
    return [
        msgspec.structs.replace(record, time_ns=record.time_ns + (shift_ns if record.seq >= seq else 0))
        for record in records
    ]


def lanes_with(work: NodeWork) -> dict[str, dict[str, Any]]:
    """The lanes of a request whose node `llm` did this work in a step of two seconds."""
    script = Script()
    script.open_epoch()
    script.join()
    script.submit()
    script.complete(script.last(NodeReady))
    at = len(script.records) + 1
    script.complete(script.last(NodeReady), work={"llm": work})
    history = recorded_request.of_log(histories.collected(later(script.records, at, 2.0)))
    return {lane["key"]: lane for lane in Study(history, "r1", []).request()["lanes"]}


def test_the_lane_of_a_node_has_its_waits_by_name() -> None:
    work = NodeWork(
        calls=1, took_s=1.9, waited_s=1.4, behind=["r8", "r9"], behind_count=2, lacked="places",
        first_token_s=1.5, steps=8,
    )  # fmt: skip
    lanes = lanes_with(work)

    bars = lanes["rank 0 llm"]["bars"]
    assert [bar["kind"] for bar in bars][:3] == ["queue", "prefill", "decode"]
    assert "behind r8 and r9" in bars[0]["text"]
    assert bars[0]["requests"] == ["r8", "r9"]
    assert bars[0]["to"] - bars[0]["from"] == pytest.approx(1.4)
    [*_, order] = lanes["rank 0"]["bars"]
    assert order["from"] <= bars[0]["from"]
    assert bars[-1]["to"] <= order["to"]
    assert lanes["rank 0"]["label"] == "rank 0"
    assert lanes["rank 0 llm"]["label"] == "llm"


def test_a_node_without_work_has_no_lane() -> None:
    assert "rank 0 llm" not in lanes_with(NodeWork())


@pytest.mark.parametrize("seed", range(6))
def test_every_simulated_request_is_on_every_screen(seed: int) -> None:
    simulation = Simulation(seed)
    run(simulation)
    events = simulation.log.events
    submitted = {str(e.request_id) for e in events if isinstance(e, RequestSubmitted) and e.request_id}
    assert submitted
    history = recorded_request.of_log(histories.collected(simulation.log.records, *sorted(submitted)))
    for request_id in sorted(submitted)[:3]:
        study = Study(history, request_id, [])
        request = study.request()
        for lane in request["lanes"]:
            assert all(0 <= bar["from"] <= bar["to"] for bar in lane["bars"]), lane
            assert {bar["kind"] for bar in lane["bars"]} <= {*map(str, Kind), "order", "unreported"}
        assert json.dumps([request, study.events(0, "", ""), study.decisions()])
        found = study.decisions()
        differing = {one["request_id"] for one in found["verdicts"] if one["mismatch"]}
        first = [row for row in found["decisions"] if row["match"] in ("unexpected", "differs", "missing")]
        assert {row["request"] for row in first} == differing
        assert study.state(len(history.records) - 1)["changes"] is not None
        for effect, cause in study.causes.items():
            assert cause < effect
