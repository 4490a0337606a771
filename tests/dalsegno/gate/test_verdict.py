import json
from collections.abc import Sequence
from datetime import date
from typing import Any, get_args
from xml.etree import ElementTree as ET

import pytest

from conductor.core.request import Decision
from dalsegno.gate import accepting, differences, junit, verdict
from dalsegno.gate.coverage import Covered
from dalsegno.gate.differences import Difference, Level
from dalsegno.gate.results import Examined
from dalsegno.gate.verdict import Status, Verdict
from tests.dalsegno.gate.test_accepting import ENTRY, TODAY
from tests.dalsegno.gate.test_differences import difference

HOSTILE = "\x1b[2J\x00]]><&\"'\r\n\u202e\ud800evil"


def examined(level: Level = "control", *found: Difference, **fields: Any) -> Examined:
    usual: dict[str, Any] = {"source": "log", "decided": {"r1": 2, "r2": 3}, "differences": list(found)}
    return Examined(level=level, **usual | fields)


def reached(
    *results: Examined, accept: str = "", explicit: bool = True, today: date = TODAY, **others: Any
) -> Verdict:
    levels: Sequence[Level] = ("control", "schedule")
    return verdict.reached(
        results, accepting.read(accept, "f"), levels=levels, explicit=explicit, today=today, **others
    )


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (reached(examined()), Status.SAME),
        (reached(examined("control", difference())), Status.DIFFERENT),
        (reached(examined("control", difference()), accept=ENTRY), Status.SAME),
        (reached(examined(), accept=ENTRY), Status.DIFFERENT),
        (reached(examined("control", difference()), accept=ENTRY, today=date(2028, 1, 1)), Status.DIFFERENT),
        (reached(examined(cannot={"r3": "its submission has expired"})), Status.NOT_REPLAYABLE),
        (reached(examined("control", difference(), cannot={"r3": "gone"})), Status.DIFFERENT),
        (reached(examined(), examined("schedule", decided={}, whole="no")), Status.NOT_REPLAYABLE),
        (reached(examined(), examined("schedule", decided={}, whole="no"), explicit=False), Status.SAME),
        (reached(examined(cannot={"r3": "gone"}), explicit=False), Status.NOT_REPLAYABLE),
        (reached(examined(), unreadable=[("a.bundle", "it was altered")]), Status.NOT_REPLAYABLE),
        (reached(), Status.NOTHING),
        (reached(examined(decided={})), Status.NOTHING),
    ],
)
def test_the_status_says_what_was_found(found: Verdict, expected: Status) -> None:
    assert found.status is expected


def test_the_statuses_are_those_of_the_manual() -> None:
    assert [int(one) for one in Status] == [0, 1, 2, 3, 4]


def test_the_report_has_a_line_for_each_level_group_and_reason() -> None:
    one = examined("schedule", decided={}, whole="the log begins at record 7")
    accepted = difference("r2", field="walks[*].args.ignore_eos")
    other = difference("r1", field="placement.llm", recorded=0, found=1)
    found = reached(examined("control", accepted, other), one, accept=ENTRY, explicit=False)
    [(_, [group])] = found.accepted
    assert verdict.lines(found) == [
        "control: 2 requests, 5 decisions: 1 group of differences",
        "control: 1 of 2: node.ready placement.llm 0 -> 1, first r1 at 123",
        f"accepted: the option ends (mo, until 2027-01-31): {differences.line_of(group)}",
        "schedule: not replayable (the log begins at record 7): log",
        "different",
    ]


def test_unused_and_expired_entries_are_named() -> None:
    unused = verdict.lines(reached(examined(), accept=ENTRY))
    assert "entry 1 accepts nothing: node.ready walks[*].args.ignore_eos: remove it" in unused
    expired = verdict.lines(reached(examined(), accept=ENTRY, today=date(2028, 1, 1)))
    assert "entry 1 expired on 2027-01-31: node.ready walks[*].args.ignore_eos (mo)" in expired


def test_json_has_the_groups_with_their_requests_and_values() -> None:
    found = reached(examined("control", difference("r1"), difference("r2")), accept="")
    data = json.loads(json.dumps(verdict.as_plain(found), default=str))
    assert (data["status"], data["exit_status"]) == ("different", 1)
    [group] = data["groups"]
    assert group["request_ids"] == ["r1", "r2"]
    assert group["values"] == [{"recorded": "true", "found": "false", "count": 2}]


def test_every_decision_of_a_conductor_has_a_case() -> None:
    decided = {str(one.__struct_config__.tag).rpartition(".")[0] for one in get_args(Decision)}
    assert {event for events in junit.DECIDED.values() for event in events} == decided


def parsed(found: Verdict) -> ET.Element:
    return ET.fromstring(junit.document(found))


def test_junit_has_a_failed_case_for_each_group_and_a_passed_one_for_each_other_event() -> None:
    seen = {"node.ready": 2, "request.finished": 2}
    covered = [Covered(name="event types", seen=seen, unseen=[])]
    one = examined("control", difference(), cannot={"r3": "gone"})
    root = parsed(reached(one, covered=covered))
    names = {case.get("name"): [child.tag for child in case] for case in root.iter("testcase")}
    assert names == {
        "request.finished as recorded": ["system-out"],
        "node.ready walks[*].args.ignore_eos": ["failure"],
        "not replayable: gone": ["error"],
    }
    assert (root.get("tests"), root.get("failures"), root.get("errors")) == ("3", "1", "1")


def test_junit_skips_what_is_accepted_and_fails_an_unused_entry() -> None:
    accepted = parsed(reached(examined("control", difference()), accept=ENTRY))
    [skipped] = accepted.iter("skipped")
    assert skipped.get("message") == "the option ends (mo, until 2027-01-31)"
    assert accepted.get("failures") == "0"
    unused = parsed(reached(examined(), accept=ENTRY))
    assert [one.get("type") for one in unused.iter("failure")] == ["unused"]


def test_hostile_text_stays_text_in_xml() -> None:
    hostile = difference(HOSTILE, event=HOSTILE, field=HOSTILE, recorded=HOSTILE, found=[HOSTILE])
    root = parsed(reached(examined("control", hostile, cannot={HOSTILE: HOSTILE})))
    [failure] = root.iter("failure")
    shown = f"{failure.get('message')}{failure.text}"
    assert "evil" in shown
    assert all(line.isprintable() for line in shown.split("\n"))
    assert not [one for one in root.iter() if one.tag == "evil"]
