import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from dalsegno.serve.role_runs import Command
from dalsegno.serve.supervisor import Backoff, RefusedError, RoleProcess, Supervisor
from dalsegno.templates import forking
from dalsegno.templates.template import Template
from tests.dalsegno.fakes import DEAF, OBEDIENT, REFUSING, Heard, command, gone
from tests.dalsegno.templates import scripts

pytestmark = pytest.mark.processes


Supervised = Callable[[str], AbstractAsyncContextManager[Supervisor]]


@pytest.fixture
def heard(tmp_path: Path) -> Heard:
    return Heard(tmp_path)


@pytest.fixture(scope="module", params=["program", "forked"])
def template(request: pytest.FixtureRequest) -> Iterator[Template | None]:
    """The two ways to start a role: as a new program, and forked by a template."""
    if request.param == "program":
        yield None
        return
    if not forking.is_supported():
        pytest.skip("templates need pidfds: Linux 5.3")
    with scripts.template() as found:
        yield found


@pytest.fixture
def supervised(heard: Heard, template: Template | None) -> Supervised:
    """A role under supervision, killed at the end of the block if it still runs."""

    @asynccontextmanager
    async def run(script: str) -> AsyncIterator[Supervisor]:
        supervisor = Supervisor(
            RoleProcess(command("role", script), heard, template), heard, lambda: None, Backoff(first=0.001)
        )
        async with asyncio.TaskGroup() as group:
            group.create_task(supervisor.run())
            try:
                yield supervisor
            finally:
                supervisor.kill()

    return run


def pid_of(supervisor: Supervisor) -> int:
    """The process id of a role that was heard: it is known before the role's first line."""
    pid = supervisor.child.pid
    assert pid is not None
    return pid


async def test_a_role_that_is_killed_starts_again(heard: Heard, supervised: Supervised) -> None:
    async with supervised(OBEDIENT) as supervisor:
        await heard.until("up")
        first = pid_of(supervisor)
        os.kill(first, signal.SIGKILL)
        assert (await heard.until("is restarted"))[
            1
        ] == "role was killed by SIGKILL; it is restarted in 0.001 s"
        await heard.until("up")
        assert pid_of(supervisor) != first


ENDED = "import os; print('found', os.environ.get('DALSEGNO_ENDED', 'nothing'), flush=True)\n"


async def test_a_role_that_starts_again_is_given_the_end_of_the_one_before(
    heard: Heard, supervised: Supervised
) -> None:
    async with supervised(ENDED + OBEDIENT) as supervisor:
        assert (await heard.until("found"))[1].endswith("found nothing")
        await heard.until("up")
        first = pid_of(supervisor)
        os.kill(first, signal.SIGKILL)
        [end] = json.loads((await heard.until("found"))[1].partition("found ")[2])

    assert (end["pid"], end["signal"]) == (first, "SIGKILL")
    assert end["last_line"].endswith("up")
    assert "status" not in end


async def test_the_last_line_of_a_role_that_failed_is_given_to_the_next_one(
    heard: Heard, supervised: Supervised
) -> None:
    fails = "import sys; print('the disk is full', file=sys.stderr, flush=True); raise SystemExit(3)"
    async with supervised(ENDED + fails):
        await heard.until("found nothing")
        [first] = json.loads((await heard.until("found ["))[1].partition("found ")[2])
        ends = json.loads((await heard.until("found ["))[1].partition("found ")[2])

    assert (first["status"], first["last_line"]) == (3, "the disk is full")
    assert ends[0] == first
    assert len(ends) == 2


async def test_a_role_that_the_launcher_killed_says_why(heard: Heard, supervised: Supervised) -> None:
    async with supervised(ENDED + OBEDIENT) as supervisor:
        await heard.until("up")
        supervisor.child.kill("it was declared lost")
        [end] = json.loads((await heard.until("found ["))[1].partition("found ")[2])

    assert (end["signal"], end["reason"]) == ("SIGKILL", "it was declared lost")


async def test_a_role_that_ends_by_itself_starts_again(heard: Heard, supervised: Supervised) -> None:
    async with supervised("raise SystemExit(3)"):
        await heard.until("role ended with status 3")
        await heard.until("role ended with status 3; it is restarted in 0.002 s")


async def test_a_role_that_refuses_its_configuration_does_not(
    heard: Heard, template: Template | None
) -> None:
    supervisor = Supervisor(RoleProcess(command("role", REFUSING), heard, template), heard, lambda: None)
    with pytest.raises(RefusedError, match=r"^role: model 'x' is unknown$"):
        await supervisor.run()


async def test_a_refusal_that_is_an_object_is_read(heard: Heard) -> None:
    script = f"print({json.dumps(json.dumps({'message': 'Error: no such model'}))}); raise SystemExit(78)"
    supervisor = Supervisor(RoleProcess(command("role", script), heard), heard, lambda: None)
    with pytest.raises(RefusedError, match=r"^role: no such model$"):
        await supervisor.run()


async def test_a_program_that_is_not_there_is_said_and_tried_again(heard: Heard) -> None:
    missing = RoleProcess(Command(name="role", program=("/no/such/program",), args=(), env={}), heard)
    supervisor = Supervisor(missing, heard, lambda: None, Backoff(first=0.001))
    async with asyncio.TaskGroup() as group:
        group.create_task(supervisor.run())
        await heard.until("role could not be started: ")
        await heard.until("it is restarted in 0.002 s")
        await supervisor.stop(grace_s=10)


async def test_stop_asks_and_the_role_may_finish(heard: Heard, supervised: Supervised) -> None:
    async with supervised(OBEDIENT) as supervisor:
        await heard.until("up")
        await supervisor.stop(grace_s=60)
        assert supervisor.child.pid is None
        assert heard.lines.get_nowait() == ("role", "told to stop")
        assert heard.lines.empty()  # no word of starting it again


async def test_a_role_that_does_not_hear_is_killed_after_its_grace(
    heard: Heard, supervised: Supervised
) -> None:
    async with supervised(DEAF) as supervisor:
        await heard.until("up")
        await supervisor.stop(grace_s=0.01)
        await heard.until("role did not stop within 0.01 s: killed")
        assert supervisor.child.pid is None


async def test_stop_cuts_the_wait_before_a_restart_short(heard: Heard, template: Template | None) -> None:
    role = RoleProcess(command("role", "raise SystemExit(3)"), heard, template)
    supervisor = Supervisor(role, heard, lambda: None, Backoff(first=3600, most=3600))
    async with asyncio.TaskGroup() as group:
        group.create_task(supervisor.run())
        await heard.until("is restarted in 3600 s")
        await supervisor.stop(grace_s=10)


async def test_what_a_role_started_does_not_outlive_it(heard: Heard, supervised: Supervised) -> None:
    script = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-I", "-c", "import signal; signal.pause()"])
print("child", child.pid, flush=True)
child.wait()
"""
    async with supervised(script) as supervisor:
        _, line = await heard.until("child")
        os.kill(pid_of(supervisor), signal.SIGKILL)
        # The grandchild holds the role's output open: the supervisor waits for its end.
        await heard.until("was killed by SIGKILL")
        await heard.until("child")
    grandchild = int(line.split()[1])
    await gone(grandchild)


async def test_a_line_without_an_end_is_cut(heard: Heard, supervised: Supervised) -> None:
    async with supervised("print('x' * 200_000, end=''); print('y')"):
        lines: list[str] = []
        while not lines or not lines[-1].endswith("y"):
            lines.append((await heard.lines.get())[1])
    assert len(lines) > 1
    assert "".join(lines) == "x" * 200_000 + "y"


async def test_being_cancelled_kills_the_role(heard: Heard, template: Template | None) -> None:
    role = RoleProcess(command("role", DEAF), heard, template)
    supervisor = Supervisor(role, heard, lambda: None)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(supervisor.run())
        await heard.until("up")
        pid = pid_of(supervisor)
        task.cancel()
    await gone(pid)


async def test_a_role_whose_template_is_killed_ends_with_it_and_starts_again_as_a_program(
    heard: Heard,
) -> None:
    script = """
import os, sys
sys.path.insert(0, os.getcwd())
from dalsegno.roles.parent_watch import die_with
die_with(int(sys.argv[-1]))
"""
    with scripts.template() as template:
        role = RoleProcess(command("role", script + OBEDIENT), heard, template)
        supervisor = Supervisor(role, heard, lambda: None, Backoff(first=0.001))
        async with asyncio.TaskGroup() as group:
            group.create_task(supervisor.run())
            await heard.until("up")
            first = pid_of(supervisor)
            os.kill(template.pid, signal.SIGKILL)
            assert (await heard.until("is restarted"))[1].startswith("role was killed by SIGKILL")
            await heard.until("role has no template any more, and starts more slowly")
            await heard.until("up")
            assert pid_of(supervisor) != first
            await supervisor.stop(grace_s=60)
        await gone(first)


def test_backoff_doubles_to_its_limit() -> None:
    backoff = Backoff()
    assert [backoff.after(lived=1) for _ in range(8)] == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10, 10]


def test_backoff_begins_anew_after_a_healthy_life() -> None:
    backoff = Backoff()
    for _ in range(8):
        backoff.after(lived=1)
    assert backoff.after(lived=30) == 0.2
    assert backoff.after(lived=1) == 0.4
