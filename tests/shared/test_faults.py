"""Fault injection: a command is executed once, at its point and its count."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from dalsegno.config import environment
from shared import faults

ROOT: Final = Path(__file__).parents[2]
POINT: Final = "worker.chunk.acked"
PROGRAM: Final = f"""
import sys
from pathlib import Path
from dalsegno.config import environment
from shared import faults
faults.arm(Path(sys.argv[1]))
print("armed", flush=True)
for line in sys.stdin:
    faults.reach({POINT!r})
    faults.reach("worker.chunk.posted")
    print("passed", flush=True)
"""


class Armed:
    """A process that passes two points for every line of its input."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def said(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


@contextmanager
def armed(file: Path) -> Iterator[Armed]:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(file)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
    ) as process:
        one = Armed(process)
        try:
            assert one.said() == "armed"
            yield one
        finally:
            process.kill()


@pytest.mark.processes
def test_the_nth_time_it_kills_and_a_successor_with_the_same_file_lives(tmp_path: Path) -> None:
    file = tmp_path / "fault"
    file.write_text(faults.order(POINT, 2, "kill"))
    with armed(file) as first:
        first.go()
        assert first.said() == "passed"
        first.go()
        assert first.said() == ""
        assert first.process.wait() == -signal.SIGKILL
        assert file.read_text() == f"reached {POINT} by {first.process.pid}\n"
    with armed(file) as second:
        for _ in range(3):
            second.go()
            assert second.said() == "passed"


@pytest.mark.processes
def test_an_order_given_later_counts_from_then_on(tmp_path: Path) -> None:
    file = tmp_path / "fault"
    with armed(file) as one:
        one.go()
        assert one.said() == "passed"
        file.write_text(faults.order(POINT, 2, "kill"))
        one.go()
        assert one.said() == "passed"
        one.go()
        assert one.process.wait() == -signal.SIGKILL


@pytest.mark.processes
def test_it_stops_until_it_is_let_go_on(tmp_path: Path) -> None:
    file = tmp_path / "fault"
    file.write_text(faults.order(POINT, 1, "stop"))
    with armed(file) as one:
        one.go()
        _, status = os.waitpid(one.process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        assert file.read_text().startswith("reached ")
        one.process.send_signal(signal.SIGCONT)
        assert one.said() == "passed"


@pytest.mark.processes
def test_who_waits_goes_on_when_the_file_says_something_else(tmp_path: Path) -> None:
    file = tmp_path / "fault"
    file.write_text(faults.order(POINT, 1, "wait"))
    with armed(file) as one:
        one.go()
        while not file.read_text().startswith("reached "):
            assert one.process.poll() is None
        file.write_text("")
        assert one.said() == "passed"


def test_nothing_happens_where_nobody_armed_it() -> None:
    for point in faults.POINTS:
        faults.reach(point)


@pytest.mark.parametrize("text", ["worker.chunk:1:kill", f"{POINT}:0x1:kill", f"{POINT}:1:burn", POINT])
def test_what_is_no_order_is_refused_at_the_start(text: str, tmp_path: Path) -> None:
    file = tmp_path / "fault"
    file.write_text(text)
    with pytest.raises(faults.FaultError, match=re.escape(text)):
        faults.arm(file)


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(faults.FaultError, match="No such file"):
        faults.arm(tmp_path / "none" / "fault")


@pytest.mark.processes
def test_a_role_says_that_it_is_armed_and_refuses_what_is_no_order(tmp_path: Path) -> None:
    file = tmp_path / "fault"
    file.write_text(f"{POINT}:soon:kill")
    command = [sys.executable, "-m", "dalsegno", "conductor", "--config", "demo", "--nats", "127.0.0.1:9"]
    env = {**os.environ, environment.FAULT: str(file)}

    refused = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=60)
    assert refused.returncode == 78
    assert refused.stderr.strip().endswith(f"found '{POINT}:soon:kill'")

    file.write_text(faults.order(POINT, 1, "kill"))
    armed = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=60)
    assert "ARMED TO FAIL" in armed.stderr
