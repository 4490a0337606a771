"""`dalsegno gate` over bundles, which need no server. `tests/e2e/test_gate.py` runs it over data dirs."""

import json
from pathlib import Path
from xml.etree import ElementTree as ET

import msgspec
import pytest
from click.testing import CliRunner, Result

from dalsegno.cli import main
from shared.events import RequestFinished, decode, encode
from tests.dalsegno.histories import answered
from tests.dalsegno.replay.test_command_line import altered, written
from tests.histories import FOLDER

ACCEPTED = """
- event: request.finished
  field: {field}
  reason: it is meant
  author: mo
  expires: {expires}
"""


def gate(*args: object) -> Result:
    return CliRunner().invoke(main, ["gate", "--processes", "1", *map(str, args)])


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    return written(tmp_path / "whole.bundle", answered())


@pytest.fixture
def other(tmp_path: Path) -> Path:
    return written(tmp_path / "other.bundle", altered())


@pytest.fixture
def accept(tmp_path: Path) -> Path:
    path = tmp_path / "accept.yaml"
    path.write_text(ACCEPTED.format(field="finish_reasons", expires="2999-01-31"))
    return path


def test_an_unchanged_bundle_is_the_same(whole: Path) -> None:
    found = gate(whole)
    assert found.exit_code == 0, found.output
    lines = found.stdout.splitlines()
    assert lines[0] == "control: 1 request, 3 decisions: as recorded"
    assert lines[-1] == "same"
    assert any(line.startswith("schedule: not replayable (its configuration is not stored") for line in lines)


def test_a_level_that_is_named_must_be_replayable(whole: Path) -> None:
    found = gate(whole, "--levels", "schedule,control")
    assert found.exit_code == 3
    assert found.stdout.splitlines()[-1] == "no difference, but not everything could be repeated"
    assert gate(whole, "--levels", "control").exit_code == 0


def test_a_difference_is_one_line_with_event_field_values_request_and_position(other: Path) -> None:
    found = gate(other)
    assert found.exit_code == 1
    [line] = [one for one in found.stdout.splitlines() if one.startswith("control: 1 of 1")]
    assert line == (
        f'control: 1 of 1: request.finished finish_reasons ["stop"] -> ["length"], first r1 of {other} at 12'
    )
    assert found.stdout.splitlines()[-1] == "different"


def test_a_folder_is_all_its_bundles_and_a_bundle_is_read_once(whole: Path, other: Path) -> None:
    found = gate(whole.parent, whole)
    assert found.exit_code == 1
    assert "control: 1 of 2: request.finished" in found.stdout


def test_what_is_accepted_passes_and_is_shown_with_its_reason(other: Path, accept: Path) -> None:
    found = gate(other, "--accept", accept)
    assert found.exit_code == 0, found.output
    assert "accepted: it is meant (mo, until 2999-01-31): control: 1 of 1: request.finished" in found.stdout


def test_an_unused_and_an_expired_entry_fail(whole: Path, other: Path, accept: Path) -> None:
    unused = gate(whole, "--accept", accept)
    assert unused.exit_code == 1
    assert "entry 1 accepts nothing: request.finished finish_reasons: remove it" in unused.stdout
    accept.write_text(ACCEPTED.format(field="finish_reasons", expires="2020-01-31"))
    expired = gate(other, "--accept", accept)
    assert expired.exit_code == 1
    assert "entry 1 expired on 2020-01-31: request.finished finish_reasons (mo)" in expired.stdout


def test_a_malformed_accept_file_is_a_usage_error_that_names_the_key(whole: Path, accept: Path) -> None:
    accept.write_text(ACCEPTED.format(field="3", expires="soon"))
    found = gate(whole, "--accept", accept)
    assert found.exit_code == 2
    assert "accept.yaml, entry 1: field: expected a text, found 3" in found.stderr
    assert gate(whole, "--accept", accept.with_name("none.yaml")).exit_code == 2


@pytest.mark.parametrize(
    "wrong",
    [("--levels", "all"), ("--window", "soon"), ("--last", "0"), ("--sample", "0"), ("--processes", "0")],
)
def test_wrong_options_are_usage_errors(whole: Path, wrong: tuple[str, str]) -> None:
    assert gate(whole, *wrong).exit_code == 2


def test_a_source_that_is_not_there_is_a_usage_error(tmp_path: Path) -> None:
    found = gate(tmp_path / "none.bundle")
    assert found.exit_code == 2
    assert "there is no such file" in found.stderr


def test_a_bundle_that_cannot_be_read_is_not_replayable_and_the_others_are_compared(whole: Path) -> None:
    whole.with_name("a.bundle").write_text("{}")
    found = gate(whole.parent)
    assert found.exit_code == 3
    assert "control: 1 request, 3 decisions: as recorded" in found.stdout
    assert "a.bundle" in found.stdout


def test_a_selection_without_requests_repeats_nothing(whole: Path) -> None:
    found = gate(whole, "--window", "1000..")
    assert found.exit_code == 4
    assert found.stdout.splitlines()[-1] == "nothing was repeated: no request is in the selection"


def test_json_and_junit_have_the_same_groups(other: Path, tmp_path: Path) -> None:
    file = tmp_path / "gate.xml"
    found = gate(other, "--json", "--junit", file)
    assert found.exit_code == 1
    data = json.loads(found.stdout)
    assert (data["status"], data["exit_status"]) == ("different", 1)
    [group] = data["groups"]
    assert (group["event"], group["field"], group["request_ids"]) == (
        "request.finished",
        "finish_reasons",
        ["r1"],
    )
    [case] = [one for one in ET.parse(file).iter("testcase") if one.find("failure") is not None]
    assert case.get("name") == "request.finished finish_reasons"


def test_hostile_text_of_a_record_stays_text(tmp_path: Path) -> None:
    evil = "\x1b[2J\r\nevil\u202e"
    *records, last = answered()
    finished = decode(last.data)
    assert isinstance(finished, RequestFinished)
    hostile = msgspec.structs.replace(finished, finish_reasons=[evil])
    records.append(msgspec.structs.replace(last, data=encode(hostile)))
    found = gate(written(tmp_path / "evil.bundle", records), "--junit", tmp_path / "gate.xml")
    assert found.exit_code == 1
    assert "evil" in found.stdout
    assert all(line.isprintable() for line in found.stdout.splitlines())
    assert "evil" in (tmp_path / "gate.xml").read_text()
    ET.parse(tmp_path / "gate.xml")


def test_the_recorded_histories_pass_and_cover_every_outcome() -> None:
    found = gate(FOLDER, "--json")
    assert found.exit_code == 0, found.output
    data = json.loads(found.stdout)
    assert data["levels"][0]["requests"] >= 19
    outcomes = next(one for one in data["coverage"] if one["name"] == "outcomes")
    assert outcomes["unseen"] == []


def test_the_altered_history_is_different() -> None:
    found = gate(FOLDER / "wrong")
    assert found.exit_code == 1
    assert "request.finished usage.completion_tokens" in found.stdout


@pytest.mark.processes
def test_several_processes_find_the_same() -> None:
    alone = gate(FOLDER, FOLDER / "wrong", "--json")
    shared = CliRunner().invoke(
        main, ["gate", "--processes", "3", str(FOLDER), str(FOLDER / "wrong"), "--json"]
    )
    assert shared.exit_code == alone.exit_code == 1
    assert json.loads(shared.stdout) == json.loads(alone.stdout)
