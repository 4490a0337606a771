from typing import Any

import pytest

from dalsegno.gate import selection
from dalsegno.gate.selection import Seen
from dalsegno.history.summary import Summary
from shared.errors import ClientError
from tests.conductor.script import SUBJECTS, Script
from tests.dalsegno.gate.rich_log import rich_log

NS = 1_000_000_000


def seen(number: int, outcome: str = "finished", **fields: Any) -> Seen:
    summary = Summary(
        request_id=f"r{number}", model="demo", seq=number, start_ns=number * NS, outcome=outcome
    )
    usual: dict[str, Any] = {"source": "log", "summary": summary}
    return Seen(request_id=f"r{number}", seq=number, time_ns=number * NS, **usual | fields)


def names(found: list[Seen]) -> list[str]:
    return [one.request_id for one in found]


def test_the_newest_are_the_last_that_were_submitted_in_all_sources() -> None:
    many = [seen(3), seen(1), seen(2, source="other"), seen(4)]
    assert names(selection.chosen(many, last=3)) == ["r2", "r3", "r4"]


def test_a_request_whose_submission_has_expired_is_chosen_only_with_all_others() -> None:
    expired = seen(9, summary=None)
    assert names(selection.chosen([seen(1), expired])) == ["r1", "r9"]
    assert names(selection.chosen([seen(1), expired], last=2)) == ["r1"]
    assert names(selection.chosen([seen(1), expired], within=selection.window("1.."))) == ["r1"]


def test_a_sample_has_some_of_each_outcome_and_layout_spread_over_time() -> None:
    many = [seen(number, layout="llm 0") for number in range(1, 11)]
    many += [seen(11, "failed", layout="llm 0"), seen(12, layout="llm 1")]
    assert names(selection.chosen(many, sample=2)) == ["r5", "r10", "r11", "r12"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2..3", ["r2", "r3"]),
        ("3..", ["r3", "r4"]),
        ("..1", ["r1"]),
        ("1970-01-01T00:00:02..1970-01-01T00:00:03", ["r2", "r3"]),
        ("1970-01-01T01:00:04+01:00..", ["r4"]),
    ],
)
def test_a_window_is_of_positions_or_of_times(text: str, expected: list[str]) -> None:
    many = [seen(number) for number in range(1, 5)]
    assert names(selection.chosen(many, within=selection.window(text))) == expected


@pytest.mark.parametrize("text", ["", "..", "5", "now..", "1..2..3"])
def test_what_is_no_window_is_refused(text: str) -> None:
    with pytest.raises(ClientError):
        selection.window(text)


def test_the_contents_of_a_log_are_its_requests_with_outcome_code_layout_and_events() -> None:
    log = rich_log(1, "fsfs", 60)
    found = selection.contents(log.records, SUBJECTS, "log")
    assert {"worker.joined", "epoch.opened"} <= found.types
    finished = [one for one in found.requests.values() if one.outcome == "finished"]
    assert finished
    for one in finished:
        assert one.layout in {f"llm {rank}, prepare {rank}" for rank in range(3)}
        assert {"request.submitted", "request.admitted", "node.ready", "request.finished"} <= one.types
        assert (one.family, one.config) == ("decoder_lm", "c")


def test_records_of_a_request_without_its_submission_are_of_an_expired_one() -> None:
    script = Script()
    script.open_epoch()
    script.join()
    script.submit("r1")
    script.run_to_the_end("r1")
    later = [one for one in script.records if one.subject != SUBJECTS.request("r1")]
    [one] = selection.contents(later, SUBJECTS, "log").requests.values()
    assert one.outcome == "expired"
