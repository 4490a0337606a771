import json
from typing import Any

import pytest

from dalsegno.replay.stepper import Stepper
from dalsegno.replay.timeline import ReplayTimeline
from models import registry
from tests.conductor.script import SUBJECTS
from tests.dalsegno.histories import answered


def stepper() -> Stepper:
    return Stepper(ReplayTimeline(answered(), ["r1"], graph_of=registry.graph, subjects=SUBJECTS))


def typed(*commands: str) -> list[str]:
    said: list[str] = []
    stepper().run(commands, said.append, as_json=False)
    return said


def answers(*commands: str) -> list[dict[str, Any]]:
    said: list[str] = []
    stepper().run(commands, said.append, as_json=True)
    return [json.loads(line) for line in said]


def test_it_begins_at_the_first_record_and_ends_with_the_commands_or_at_quit() -> None:
    assert len(typed()) == 1
    assert typed()[0].startswith("[1/12]      1  conductor/1    epoch.opened")
    assert len(typed("quit", "next", "next")) == 1
    assert len(typed("q")) == 1


@pytest.mark.parametrize(
    ("commands", "seq"),
    [
        (["next"], 2),
        (["n"], 2),
        ([""], 2),
        (["n 3"], 4),
        (["n 99"], 12),
        (["n 5", "previous"], 5),
        (["n 5", "p 2"], 4),
        (["n 5", "p 99"], 1),
        (["go 7"], 7),
        (["g node.ready"], 5),
        (["g node.ready", "g node.ready"], 7),
        (["g r1.admitted"], 4),
    ],
)
def test_going(commands: list[str], seq: int) -> None:
    assert answers(*commands)[-1]["seq"] == seq


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("previous", "this is the beginning: record 1"),
        ("n 0", "next takes a number of records, 1 or more; found '0'"),
        ("n x", "next takes a number of records, 1 or more; found 'x'"),
        ("go", "go: expected one position of the log, event id or event type"),
        ("go nowhere", "no record here is 'nowhere'"),
        ("state r9", "state: expected one of world"),
        ("diff 1 2 3", "expected at most two positions, FROM and TO"),
        ("jump", "no such command: 'jump'; expected one of next, previous, go, state, diff"),
    ],
)
def test_what_is_not_understood_is_said_and_the_next_command_is_taken(command: str, said: str) -> None:
    one = stepper()
    told: list[str] = []
    one.run([command, "go 5"], told.append, as_json=False)
    assert told[1].startswith(said)
    assert told[2].startswith("[5/12]")
    assert one.refused == 1


def test_at_the_end_next_says_that_it_is_the_end() -> None:
    assert typed("go 12", "next")[-1] == "this is the end: record 12"


def test_looking() -> None:
    assert answers("go 9", "state r1")[-1]["state"]["r1"]["output"]["text"] == "secret0secret1"
    assert set(answers("go 9", "state")[-1]["state"]) == {"world", "r1"}
    assert answers("go 9", "event")[-1]["event"]["text"] == "secret1"
    assert [one["seq"] for one in answers("list")[-1]["records"]] == list(range(1, 13))
    assert '  r1.output.text: "secret0" -> "secret0secret1"' in typed("go 9", "diff")
    assert '+ r1.output.text: "secret0secret1"' in typed("go 9", "diff 1")
    assert '+ r1.output.text: "secret0secret1"' in typed("diff 1 9")
    assert "nothing changed from 3 to 3" in typed("diff 3 3")
    assert typed("verdict")[-1] == "nothing is submitted yet"
    assert typed("go 12", "verdict")[-1] == "r1: 3 decided so far, all as recorded (10 events)"
    assert any(line.startswith("> [4/12]") for line in typed("go 4", "list"))
    assert any("to a position of the log" in line for line in typed("help"))


def test_where_a_decision_is_not_the_recorded_one_it_is_explained() -> None:
    records = [record for record in answered() if record.seq != 6]
    said: list[str] = []
    one = Stepper(ReplayTimeline(records, ["r1"], graph_of=registry.graph, subjects=SUBJECTS))
    one.run(["go 7"], said.append, as_json=False)
    assert said[2] == ("  request r1: r1.ready.1.1.0 is recorded, but the facts before it do not lead to it")
    assert any(line.startswith("  state before: ") for line in said)
