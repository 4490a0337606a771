import signal
import subprocess
import sys

import pytest

from dalsegno.exit_status import EX_CONFIG, EX_INTERRUPTED, EX_SOFTWARE, EX_UNAVAILABLE
from dalsegno.roles import role_process
from models import registry
from shared.errors import BugError, CapacityError, ClientError

ROLE = """
import asyncio, signal, sys
from dalsegno.roles import logging_setup, role_process, signal_echo
from configs.deployment import LogSettings
signal_echo.ECHO_S = 0.0 if "impatient" in sys.argv else 1e9
logging_setup.set_up(LogSettings(), "test")

async def role():
    go_on = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, go_on.set)
    print("up", flush=True)
    try:
        await asyncio.Event().wait()
    finally:
        print("draining", flush=True)
        if "slow" in sys.argv:
            await go_on.wait()
        print("drained", flush=True)

sys.exit(role_process.run(role))
"""


def start(*args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", ROLE, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def line(role: subprocess.Popen[str]) -> str:
    assert role.stdout is not None
    return role.stdout.readline().strip()


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_a_role_stop_in_its_own_order(number: signal.Signals) -> None:
    with start() as role:
        assert line(role) == "up"
        role.send_signal(number)
        out, err = role.communicate(timeout=60)
    assert (out.split(), role.returncode) == (["draining", "drained"], 0)
    assert f"test INFO  stopping: {number.name}" in err


@pytest.mark.processes
def test_a_second_signal_ends_it_at_once() -> None:
    with start("slow", "impatient") as role:
        assert line(role) == "up"
        role.send_signal(signal.SIGTERM)
        assert line(role) == "draining"
        role.send_signal(signal.SIGTERM)
        assert role.wait(timeout=60) == EX_INTERRUPTED


@pytest.mark.processes
def test_the_echo_of_a_signal_is_none_of_its_own() -> None:
    with start("slow") as role:
        assert line(role) == "up"
        role.send_signal(signal.SIGTERM)
        assert line(role) == "draining"
        role.send_signal(signal.SIGTERM)
        role.send_signal(signal.SIGUSR1)
        out, _ = role.communicate(timeout=60)
    assert (out.split(), role.returncode) == (["drained"], 0)


async def failing(error: Exception) -> None:
    raise error


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ClientError("no such model"), EX_CONFIG),
        (CapacityError("no such log"), EX_UNAVAILABLE),
        (ExceptionGroup("tasks", [ExceptionGroup("more", [ClientError("no such model")])]), EX_CONFIG),
        (ExceptionGroup("tasks", [CapacityError("no such log")]), EX_UNAVAILABLE),
    ],
)
def test_an_error_of_ours_is_one_line_and_a_status(
    error: Exception, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert role_process.run(lambda: failing(error)) == status
    written = capsys.readouterr()
    assert written.err in {"Error: no such model\n", "Error: no such log\n"}
    assert written.out == ""


def test_a_library_that_is_not_installed_is_one_line_that_says_how_to_get_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    missing = ModuleNotFoundError("No module named 'torch.nn'", name="torch.nn")
    assert role_process.run(lambda: failing(ExceptionGroup("tasks", [missing]))) == EX_CONFIG
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("Error: torch is not installed")
    assert "pip install 'dalsegno[all]'" in line


def test_a_missing_module_of_a_family_is_one_line_with_its_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "families", lambda: {"parrot": "parrots.green"})
    missing = ModuleNotFoundError("No module named 'parrots.green.nodes'", name="parrots.green.nodes")
    assert role_process.run(lambda: failing(ExceptionGroup("tasks", [missing]))) == EX_CONFIG
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("Error: model family parrot has no module parrots.green.nodes")
    assert "docs/adding-a-model.md" in line
    assert "not installed" not in line


@pytest.mark.parametrize(
    "error",
    [
        ModuleNotFoundError("No module named 'workers.gone'", name="workers.gone"),
        ZeroDivisionError("division by zero"),
        BugError("a promise is broken"),
        ExceptionGroup("tasks", [CapacityError("no such log"), ZeroDivisionError("division by zero")]),
    ],
)
def test_a_bug_is_a_traceback(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    assert role_process.run(lambda: failing(error)) == EX_SOFTWARE
    assert type(error).__name__ in caplog.text
