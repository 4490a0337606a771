"""The command: what it is given, what it says, and that it is reached through its link only."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner

from dalsegno.cli import main
from tests.dalsegno.studio.pages import HISTORIES


@pytest.fixture
def running(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A studio on all histories, in a folder without a data dir."""
    command = [sys.executable, "-m", "dalsegno", "studio", str(HISTORIES)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        yield process
        process.kill()


def line_with(process: subprocess.Popen[str], part: str) -> str:
    assert process.stdout is not None
    return next(line for line in process.stdout if part in line)


@pytest.mark.processes
def test_it_serves_until_it_is_stopped_and_offers_the_next_link(running: subprocess.Popen[str]) -> None:
    assert "18 bundles" in line_with(running, "shows")
    link = line_with(running, "Open ").split()[1]
    base = link.partition("/enter")[0]
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+", base)

    with httpx.Client(base_url=base, follow_redirects=True) as browser:
        assert browser.get("/").status_code == 401
        assert "Dal Segno studio" in browser.get(link).text
        assert len(browser.get("/api/requests").json()["rows"]) == 20
    assert "/enter?token=" in line_with(running, "another browser")
    running.send_signal(signal.SIGINT)
    assert running.wait(30) in (0, 130)


@pytest.mark.processes
def test_in_a_container_it_listens_everywhere_and_answers_to_loopback_names_only(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dalsegno", "studio", str(HISTORIES), "--host", "0.0.0.0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        link = line_with(process, "Open ").split()[1]
        base = link.partition("/enter")[0]
        port = base.rpartition(":")[2]
        assert base == f"http://127.0.0.1:{port}"
        with httpx.Client(base_url=f"http://127.0.0.2:{port}") as browser:
            refused = browser.get(link.removeprefix(base))
            assert refused.status_code == 403
            assert f"expected the host 127.0.0.1:{port}" in refused.text
            entered = browser.get(link.removeprefix(base), headers={"host": f"127.0.0.1:{port}"})
            assert entered.status_code == 303
        process.kill()


@pytest.mark.parametrize(
    ("arguments", "status", "part"),
    [
        (["no-such.bundle"], 1, "no-such.bundle"),
        ([str(Path(__file__))], 1, "test_command.py"),
        ([str(Path(__file__).parent)], 1, "*.bundle"),
        (["--nats", "nats://127.0.0.1:1", "--data-dir", "x"], 2, "--nats and --data-dir"),
        (["--data-dir", "no-such-dir"], 1, "no-such-dir"),
        (["--port", "70000"], 2, "70000"),
        (["--host", "192.0.2.1", str(HISTORIES)], 1, "192.0.2.1:0 cannot be used"),
    ],
)
def test_what_cannot_be_shown_is_one_line(arguments: list[str], status: int, part: str) -> None:
    result = CliRunner().invoke(main, ["studio", *arguments])

    assert result.exit_code == status, result.output
    assert part in result.output
    assert "Traceback" not in result.output


def test_two_data_dirs_are_refused(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name / "nats").mkdir(parents=True)

    result = CliRunner().invoke(main, ["studio", str(tmp_path / "a"), str(tmp_path / "b")])

    assert result.exit_code == 2
    assert "two data dirs" in result.output
