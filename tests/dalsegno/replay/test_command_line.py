"""`dalsegno replay BUNDLE`: on a machine that has the file and nothing else."""

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from dalsegno.bundle import bundle_file
from dalsegno.cli import main
from shared.events import RequestFinished, decode, encode
from shared.log.port import StoredRecord
from tests.dalsegno.histories import answered, bundled

OFFLINE = """
import sys
from dalsegno.cli import main
try:
    main(sys.argv[1:])
finally:
    print(sorted({"torch", "nats", "uvicorn", "fastapi", "transformers"} & set(sys.modules)), file=sys.stderr)
"""


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    return written(tmp_path / "r1.bundle", answered())


def written(path: Path, records: list[StoredRecord], **how: bool) -> Path:
    header, kept = bundled(records, **how)
    with path.open("wb") as file:
        bundle_file.write(file, header, kept)
    return path


def altered() -> list[StoredRecord]:
    """A decision that did not follow, in a bundle that is whole."""
    *records, last = answered()
    finished = decode(last.data)
    assert isinstance(finished, RequestFinished)
    return [
        *records,
        msgspec.structs.replace(
            last, data=encode(msgspec.structs.replace(finished, finish_reasons=["stop"]))
        ),
    ]


def replay(*args: object, stdin: bytes | None = None) -> Result:
    return CliRunner().invoke(main, ["replay", *map(str, args)], input=stdin)


def the_line(result: Result, status: int = 1) -> str:
    assert result.exit_code == status, result.output
    assert not result.stdout
    (line,) = result.stderr.strip().splitlines()
    return line.removeprefix("Error: ")


@pytest.mark.processes
def test_a_bundle_matches_without_server_and_model(whole: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", OFFLINE, "replay", str(whole)], capture_output=True, text=True, check=True
    )
    assert "r1: finished: all 3 decisions match (control replay of 10 events" in ended.stdout
    assert ended.stderr == "[]\n"


def test_a_bundle_may_come_from_stdin(whole: Path) -> None:
    found = replay("-", stdin=whole.read_bytes())
    assert found.exit_code == 0
    assert found.output.splitlines()[-1].startswith("-: r1: finished: ")


def test_a_bundle_that_differs_shows_both_and_is_status_1(tmp_path: Path) -> None:
    path = written(tmp_path / "r1.bundle", altered())
    found = replay(path)
    assert found.exit_code == 1
    assert (
        "r1: 2 decisions match, then: request r1: r1.end is recorded otherwise than decided" in found.stdout
    )
    assert "differs: finish_reasons: expected ['length'], recorded ['stop']" in found.stdout
    [told] = map(json.loads, replay(path, "--json").stdout.splitlines())
    assert (told["level"], told["matches"], told["mismatch"]["seq"]) == ("control", False, 12)


def test_a_damaged_bundle_is_one_line_and_status_1(whole: Path) -> None:
    data = whole.read_bytes()
    whole.write_bytes(data.replace(b"secret1", b"secret7", 1))
    assert "line 10: not as it was exported: the event" in the_line(replay(whole))
    whole.write_bytes(data[:-30])
    assert "is cut off" in the_line(replay(whole))
    whole.write_bytes(b"")
    assert "is empty" in the_line(replay(whole))
    assert "No such file" in the_line(replay(whole.with_name("none.bundle")))


def test_outputs_that_are_not_there_are_not_said_to_be_equal(tmp_path: Path) -> None:
    path = written(tmp_path / "r1.bundle", answered(data=b"sound"))
    found = replay(path)
    assert found.exit_code == 0
    assert "outputs are not compared, because the bundle lacks some of their bytes" in found.stdout
    [told] = map(json.loads, replay(path, "--json").stdout.splitlines())
    assert told["outputs_compared"] is False
    with_all = written(tmp_path / "all.bundle", answered(data=b"sound"), payloads=True)
    assert "not compared" not in replay(with_all).stdout


def test_a_folder_is_a_gate(tmp_path: Path, whole: Path) -> None:
    assert replay(tmp_path).stdout.splitlines()[-1].startswith("1 of 1 requests match; 12 events in ")
    written(tmp_path / "other.bundle", altered())
    (tmp_path / "torn.bundle").write_bytes(whole.read_bytes()[:-9])
    (tmp_path / "notes.txt").write_text("no bundle, and not looked at")
    found = replay(tmp_path)
    assert found.exit_code == 1
    assert (
        "1 of 2 requests match; 1 differs; 1 file cannot be read; 24 events" in found.stdout.splitlines()[-1]
    )
    told = [json.loads(line) for line in replay(tmp_path, "--json").stdout.splitlines()]
    assert [Path(one["source"]).name for one in told] == ["other.bundle", "r1.bundle", "torn.bundle"]
    assert [one["matches"] for one in told] == [False, True, False]


def test_a_torn_file_alone_is_status_1(tmp_path: Path, whole: Path) -> None:
    (tmp_path / "torn.bundle").write_bytes(whole.read_bytes()[:-9])
    assert replay(tmp_path).exit_code == 1


def test_a_folder_without_bundles_is_a_mistake(tmp_path: Path) -> None:
    assert "has no bundles: expected files *.bundle" in the_line(replay(tmp_path))


def test_until_stops_behind_a_record(whole: Path) -> None:
    found = replay(whole, "--until", "node.ready")
    assert found.exit_code == 0
    assert found.stdout.startswith("[5/12]      5  conductor/1    node.ready")
    assert "r1: 1 decided so far, all as recorded (3 events)" in found.stdout
    told = json.loads(replay(whole, "--until", "6", "--json").stdout)
    assert told["until"]["seq"] == 6
    assert told["state"]["r1"]["phase"] == "running"
    assert [one["decided"] for one in told["verdicts"]] == [1]


def test_until_sees_a_difference_that_lies_before(tmp_path: Path) -> None:
    path = written(tmp_path / "r1.bundle", altered())
    assert replay(path, "--until", "11").exit_code == 0
    assert replay(path, "--until", "12").exit_code == 1


def test_state_and_diff(whole: Path) -> None:
    assert json.loads(replay(whole, "--state", "9").stdout)["r1"]["output"]["chunks"] == 2
    assert json.loads(replay(whole, "--state", "9", "--json").stdout)["seq"] == 9
    assert replay(whole, "--diff", "8", "9").stdout.splitlines()[-1] == (
        '  r1.output.text: "secret0" -> "secret0secret1"'
    )
    assert json.loads(replay(whole, "--diff", "8", "9", "--json").stdout)["changes"][0]["after"] == 2


def test_stepping_takes_its_commands_from_a_pipe(whole: Path) -> None:
    found = replay(whole, "--step", stdin=b"next 4\ndiff\nquit\n")
    assert found.exit_code == 0
    assert found.stdout.splitlines()[1].startswith("[5/12]")
    assert "replay> " not in found.stdout
    begun = replay(whole, "--step", "--until", "walk.completed", "--json", stdin=b"")
    assert json.loads(begun.stdout)["event"]["type"] == "walk.completed.v1"


def test_a_piped_command_that_is_none_is_status_1(whole: Path) -> None:
    found = replay(whole, "--step", stdin=b"jump\nnext\n")
    assert found.exit_code == 1
    assert found.stdout.splitlines()[-1].startswith("[2/12]")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ((), "name one REQUEST_ID, BUNDLE, FOLDER or TRACE, or say --all"),
        (("r1", "--all"), "name one REQUEST_ID, BUNDLE, FOLDER or TRACE, or say --all"),
        (("r1", "--last", "3"), "--last goes with --all"),
        (("r1", "--step", "--state", "3"), "--state and --step: name one of them"),
        (("r1", "--until", "3", "--state", "3"), "--until goes with --step, or stands alone"),
        (("--all", "--step"), "--step is for one request: name it"),
        (("-", "--step"), "--step reads its commands from stdin"),
    ],
)
def test_what_cannot_be_meant_is_a_mistake_in_the_arguments(args: tuple[str, ...], said: str) -> None:
    found = replay(*args)
    assert found.exit_code == 2
    assert said in found.stderr


def test_what_is_shown_cannot_steer_the_terminal(tmp_path: Path) -> None:
    path = written(tmp_path / "r1.bundle", answered("\x1b[2Jevil"))
    for args in (("--until", "3"), ("--state", "3"), ("--diff", "1", "3")):
        assert "\x1b" not in replay(path, *args).stdout
    assert "\x1b" not in replay(path, "--step", stdin=b"list\ngo 3\nevent\n").stdout


def test_a_bundle_without_its_submission_is_no_match(tmp_path: Path) -> None:
    path = written(tmp_path / "r1.bundle", [one for one in answered() if one.seq != 3])
    found = replay(path)
    assert found.exit_code == 1
    assert "r1: cannot be replayed: its records contain no submission" in found.stdout
