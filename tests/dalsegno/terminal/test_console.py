import errno
import io
import json
import logging
import re
import sys
from pathlib import Path

import pytest

from dalsegno.terminal import console
from dalsegno.terminal.console import Console


def test_a_roles_line_goes_to_the_terminal_behind_its_name_and_to_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = Console(tmp_path)
    told.role("gateway", "listening, però".encode())
    told.say("all is well")
    told.close()
    theirs, ours = capsys.readouterr().err.splitlines()
    assert theirs == "gateway   | listening, però"
    assert re.fullmatch(
        r"dalsegno  \| [-\d]{10} [:\d]{8}\.\d{3} INFO  all is well", ours
    )  # as the roles' own
    assert (tmp_path / "gateway.log").read_text() == "listening, però\n"
    assert (tmp_path / "dalsegno.log").read_text() == f"{ours.removeprefix('dalsegno  | ')}\n"


def test_colours_are_of_the_name_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = Console(tmp_path, colours=True)
    told.role("worker-0", b"ready")
    told.close()
    assert capsys.readouterr().err == "\x1b[33mworker-0  |\x1b[0m ready\n"
    assert (tmp_path / "worker-0.log").read_text() == "ready\n"


def test_bytes_that_are_no_text_do_no_harm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = Console(tmp_path)
    told.role("gateway", b"\xff!")
    told.close()
    assert capsys.readouterr().err == "gateway   | \ufffd!\n"
    assert (tmp_path / "gateway.log").read_bytes() == b"\xff!\n"


def test_a_file_that_has_grown_is_put_aside_and_two_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "_FILE_BYTES", 10)
    file = console.LogFile(tmp_path / "gateway.log")
    for line in (b"one and more", b"two and more", b"three"):
        file.write(line)
    file.close()
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "gateway.log.1": "two and more\n",
        "gateway.log": "three\n",
    }


def test_a_second_start_appends(tmp_path: Path) -> None:
    for line in (b"first life", b"second life"):
        file = console.LogFile(tmp_path / "gateway.log")
        file.write(line)
        file.close()
    assert (tmp_path / "gateway.log").read_text() == "first life\nsecond life\n"


def test_a_terminal_that_is_gone_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr(sys, "stderr", Gone())
    monkeypatch.setattr(sys, "stdout", Gone())
    told = Console(tmp_path)
    told.role("gateway", b"listening")
    told.show("welcome")
    told.close()
    assert (tmp_path / "gateway.log").read_text() == "listening\n"


def test_where_logs_are_json_every_line_is_an_object(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = Console(tmp_path, is_json=True)
    told.role("gateway", b'{"level":"info","message":"listening"}')
    told.role("worker-0", b"Traceback (most recent call last):")
    told.say("all is well")
    told.close()
    theirs, wrapped, ours = map(json.loads, capsys.readouterr().err.splitlines())
    assert theirs == {"level": "info", "message": "listening"}
    assert (wrapped["role"], wrapped["message"]) == ("worker-0", "Traceback (most recent call last):")
    assert (ours["role"], ours["level"], ours["message"]) == ("dalsegno", "info", "all is well")
    assert json.loads((tmp_path / "worker-0.log").read_text()) == wrapped


@pytest.mark.parametrize("is_json", [False, True])
def test_the_launcher_keeps_to_the_level_as_roles_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], *, is_json: bool
) -> None:
    told = Console(tmp_path, is_json=is_json, level="warning")
    told.say("all is well")
    told.say("worker-0 was killed", "warning")
    told.close()
    [line] = capsys.readouterr().err.splitlines()
    if is_json:
        assert (json.loads(line)["level"], json.loads(line)["message"]) == ("warning", "worker-0 was killed")
    else:
        assert line.endswith(" WARNING worker-0 was killed")


def test_what_the_launchers_own_process_logs_is_said_as_its_own_and_only_what_matters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = Console(tmp_path)
    handler = console.WarningHandler(told)
    logger = logging.getLogger("of.this.test")
    logger.addHandler(handler)
    logger.info("connected again")
    logger.warning("waiting for %s", "the log\nfor long")
    logger.removeHandler(handler)
    told.close()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("dalsegno  | ")
    assert line.endswith(" WARNING waiting for the log for long")
