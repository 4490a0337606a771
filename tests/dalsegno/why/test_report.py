"""The explanation in words: shares add up, hostile texts stay text, and a changed decision is named."""

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from dalsegno.cli import main
from dalsegno.history.event_description import stop_of
from dalsegno.history.summary import Summary
from dalsegno.replay import recorded_request
from dalsegno.why import report
from dalsegno.why.command import explanations
from dalsegno.why.comparison import unusual
from dalsegno.why.parts import Kind, Part
from dalsegno.why.report import Explanation
from models.decoder_lm import graph as decoder_lm

HISTORIES = Path(__file__).parents[2] / "histories"


def explained(name: str) -> Explanation:
    history = recorded_request.of_bundle(str(HISTORIES / f"{name}.bundle"))
    return explanations(history, [], now_ns=0)[0]


def shares(one: Explanation) -> list[float]:
    return [float(str(row[2]).removesuffix(" %")) for row in report.rows(one)]


@pytest.mark.parametrize("path", sorted(HISTORIES.glob("*.bundle")), ids=lambda path: path.stem)
def test_every_recorded_request_is_explained(path: Path) -> None:
    result = CliRunner().invoke(main, ["why", str(path)])

    assert result.exit_code == 0, result.output
    assert re.search(r"^mostly: .+ \(.+, \d+ %\)$", result.output, re.MULTILINE)
    assert re.search(r"^decisions: .+$", result.output, re.MULTILINE)


@pytest.mark.parametrize("path", sorted(HISTORIES.glob("*.bundle")), ids=lambda path: path.stem)
def test_shares_add_up_to_a_hundred_per_cent(path: Path) -> None:
    for one in explanations(recorded_request.of_bundle(str(path)), [], now_ns=0):
        assert round(sum(shares(one)), 1) == 100


def test_the_json_form_has_every_part_and_the_verdict() -> None:
    result = CliRunner().invoke(main, ["why", str(HISTORIES / "worker-died.bundle"), "--json"])
    found = json.loads(result.output)

    assert found["attempts"] == 2
    assert found["decisions"]["matches"]
    assert sum(part["seconds"] for part in found["parts"]) == pytest.approx(found["seconds"])
    assert {part["kind"] for part in found["parts"]} >= {"lost", "away"}


def test_a_request_that_cannot_be_found_is_one_line() -> None:
    result = CliRunner().invoke(main, ["why", "./nothing.bundle"])

    assert result.exit_code == 1
    assert len(result.output.splitlines()) == 1


def test_a_changed_leaf_of_a_plan_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = decoder_lm._first_walk_args

    def changed(*args: Any) -> Any:
        return msgspec.structs.replace(whole(*args), max_tokens=7)

    monkeypatch.setattr(decoder_lm, "_first_walk_args", changed)
    lines = report.remarks(explained("plain"))

    assert any(line.startswith("decisions: 1 decision matches, then: ") for line in lines)
    assert "  differs: walks[*].args.max_tokens: recorded 1006, decided 7" in lines


def test_a_rejection_names_its_code_and_message() -> None:
    one = explained("rejected")

    assert report.title(one).startswith("rejected: rejected, model_not_found, after ")
    assert any(line.startswith("error: model_not_found: the model 'nobody'") for line in report.remarks(one))


def test_the_stop_string_of_an_answer_is_named() -> None:
    assert stop_of([".", None, 7]) == " (by '.', None, token 7)"
    assert stop_of([None]) == stop_of([]) == ""


def test_many_short_parts_share_a_row() -> None:
    long = Part(kind=Kind.DECODE, begin_ns=0, end_ns=10**9, text="long")
    short = [
        Part(kind=Kind.CONDUCTOR, begin_ns=10**9 + at, end_ns=10**9 + at + 1, text=f"short {at}")
        for at in range(30)
    ]
    one = msgspec.structs.replace(explained("plain"), parts=[long, *short])
    rows = report.rows(one)

    assert [str(row[3][0]) for row in rows] == ["long", "30 short parts"]


# ---- what was unusual ------------------------------------------------------------------------------------


def summary(name: str, queue_s: float, *, tokens: int = 20, model: str = "demo") -> Summary:
    """A finished request that waited so long."""
    begin_ns = 10**18
    admitted_ns = begin_ns + round(queue_s * 1e9)
    return Summary(
        request_id=name,
        model=model,
        seq=1,
        start_ns=begin_ns,
        admitted_ns=admitted_ns,
        first_ns=admitted_ns + 10**8,
        end_ns=admitted_ns + 2 * 10**8,
        outcome="finished",
        prompt_tokens=10,
        completion_tokens=tokens,
        attempts=1,
    )


def test_a_wait_that_is_longer_than_the_others_is_unusual() -> None:
    others = [summary(f"r{number}", 0.001 * number) for number in range(10)]
    found = unusual(summary("slow", 1.4), others)

    assert [one.what for one in found] == ["wait for admission", "first output after"]
    assert found[0].text == ("wait for admission 1.400 s: median of 10 others 0.005 s, highest 0.009 s")


def test_few_others_or_another_model_make_nothing_unusual() -> None:
    others = [summary(f"r{number}", 0.001) for number in range(4)]
    elsewhere = [summary(f"e{number}", 0.001, model="other") for number in range(20)]

    assert unusual(summary("slow", 1.4), [*others, *elsewhere]) == []


def test_a_long_answer_is_unusual_and_a_normal_one_is_not() -> None:
    others = [summary(f"r{number}", 0.001, tokens=20 + number) for number in range(10)]

    assert [one.what for one in unusual(summary("long", 0.001, tokens=400), others)] == ["answer"]
    assert unusual(summary("usual", 0.001, tokens=25), others) == []
