"""What-if on screen: settings with recorded values, answers of the command, and why there is none."""

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import pytest

from configs.deployment import DeploymentConfig, NodeGroup
from dalsegno.gate import recordings
from dalsegno.gate.examination import Recording
from dalsegno.replay import recorded_request
from dalsegno.studio import what_if_view
from dalsegno.what_if.question import Question, answer
from shared.events import RequestAdmitted, decode
from tests.dalsegno.studio.pages import BUNDLES, HISTORIES, visitor

PLAIN = HISTORIES / "plain.bundle"


async def test_settings_have_their_recorded_values() -> None:
    one = await visitor(PLAIN)
    found = {row["name"]: row for row in (await one.get("/api/settings", source="b1"))["settings"]}
    assert found["scheduling.replicas"]["choices"] == ["fsfs", "rr", "random", "cache_aware"]
    assert found["max_concurrent_requests"]["default"] == 256
    assert "model_kwargs.max_sequences" in found
    assert not {"gateway.port", "checkpoint", "node_groups", "walk_timeouts_s"} & found.keys()


def test_of_several_configurations_the_newest_counts() -> None:
    configs: dict[str, Any] = {
        "a": {"max_attempts": 3},
        "b": {"max_attempts": 4, "scheduling": {"replicas": "rr"}, "model_kwargs": {"max_sequences": 8}},
    }
    found = {row["name"]: row["recorded"] for row in what_if_view.settings_of(configs)}
    assert found["max_attempts"] == 4
    assert found["scheduling.replicas"] == "rr"
    assert found["model_kwargs.max_sequences"] == 8
    assert found["kv_tokens"] is None
    assert {row["recorded"] for row in what_if_view.settings_of({})} == {None}


def whole(configs: dict[str, Any]) -> Recording:
    """A bundle of one request, with the configurations that its data dir had."""
    history = recorded_request.of_bundle(str(PLAIN))
    return recordings.of_history(PLAIN.name, msgspec.structs.replace(history, configs=configs))


def served_with() -> dict[str, Any]:
    """The configurations that the data dir of that request would keep."""
    records = recorded_request.of_bundle(str(PLAIN)).records
    [admitted] = [event for record in records if isinstance(event := decode(record.data), RequestAdmitted)]
    nodes = NodeGroup(node_names=["prepare", "llm"], ranks=[0])
    config = DeploymentConfig(model="decoder_lm", name="demo", max_seq_len=128, node_groups=[nodes])
    return {admitted.pins.config: config.recorded}


def test_an_answer_is_the_commands() -> None:
    recording = whole(served_with())
    changes = ["max_seq_len=8", "max_attempts=7"]
    found = what_if_view.answered(recording, changes, "decisions", None)
    lines = answer(recording, Question(changes=changes)).lines
    assert found["changes"]
    for change in found["changes"]:
        assert any(change["text"] in line for line in lines)
    assert found["set"] == changes
    assert (found["affected"], found["count"]) == (1, len(found["changes"]))


def test_without_its_configuration_a_recording_does_not_tell() -> None:
    found = what_if_view.answered(whole({}), ["max_attempts=7"], "decisions", None)
    assert found == {"cannot": "its configuration is not stored here", "calibration": {}}


def test_an_admission_is_shown_with_what_it_was_chosen_from() -> None:
    log = dataclasses.replace(whole(served_with()), history=None)
    [seq] = [one.seq for one in log.records if isinstance(decode(one.data), RequestAdmitted)]
    found = what_if_view.alternatives_at(log, seq)
    assert [rank["verdict"] for group in found["groups"] for rank in group["ranks"]] == ["chosen"]
    assert [one["request_id"] for one in found["queue"]] == ["plain"]
    assert what_if_view.alternatives_at(log, seq + 1)["cannot"].startswith(
        f"record {seq + 1} is no admission"
    )
    unknown = dataclasses.replace(log, configs={})
    assert what_if_view.alternatives_at(unknown, seq) == {"cannot": "its configuration is not stored here"}


async def test_a_bundle_has_not_what_a_rank_was_chosen_from() -> None:
    one = await visitor(PLAIN)
    found = await one.get("/api/alternatives", source="b1", seq=5)
    assert "open the log itself" in found["cannot"]


@pytest.mark.parametrize("path", BUNDLES, ids=lambda path: path.stem)
async def test_every_history_answers_or_says_why_not(path: Path) -> None:
    one = await visitor(path)
    found = await one.get("/api/what-if", source="b1", set="max_attempts=7")
    assert found.get("cannot") or found["requests"] > 0
    times = await one.get("/api/what-if", source="b1", set="max_concurrent_requests=7", level="times")
    assert "times need a log" in times["cannot"] or "redacted" in times["cannot"]


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ({"set": "max_concurrent=1"}, "max_concurrent_requests"),
        ({"set": "gateway.port=1"}, "none depends on gateway"),
        ({"set": "nonsense"}, "key=value"),
        ({"set": "max_attempts=0"}, ">= 1"),
        ({"set": "max_attempts=7", "level": "x" * 50}, "expected the level decisions or times"),
        ({"set": "max_attempts=7", "last": "-1"}, "expected a number"),
        ({}, "expected a value for 'set'"),
    ],
)
async def test_a_wrong_question_is_one_sentence(query: dict[str, str], says: str) -> None:
    one = await visitor(PLAIN)
    answer = await one.http.get("/api/what-if", params={"source": "b1", **query})
    assert answer.status_code == 400
    assert says in answer.json()["error"]
