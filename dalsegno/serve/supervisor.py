"""One supervised process: started, watched, restarted with back-off, and stopped in order.

Two kinds of child are supervised: a role, which is a child process whose output is relayed line by line
(`RoleProcess`), and the private nats-server (`dalsegno.serve.private_nats`). The supervisor sees only
`Child`.

A child that ends with `EX_CONFIG` can never run as configured: it is not restarted, and its last line says
why (`RefusedError`). Any other end is an accident.
"""

import asyncio
import contextlib
import json
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from dalsegno.config import environment
from dalsegno.exit_status import EX_CONFIG
from dalsegno.serve import role_runs
from dalsegno.serve.role_runs import Command, RoleRun, TemplateEndedError
from dalsegno.templates.template import Template
from dalsegno.terminal.console import Console
from shared.errors import ClientError, DalSegnoError
from shared.events import ProcessEnd

_PASSWORD: Final = re.compile(r"//[^/@\s]+@")
"""A user and a password in an address."""
HEALTHY_S: Final = 30.0
"""A run of so many seconds was healthy."""
_STARTS_KEPT: Final = 3
"""The last starts whose ends are recorded besides the first: a role that cannot start ends many times."""


class RefusedError(ClientError):
    """A role refused its configuration; the message is the role's own."""

    code = "refused"


class Child(Protocol):
    """A process that can be supervised."""

    @property
    def name(self) -> str: ...

    @property
    def pid(self) -> int | None:
        """The process id while it runs."""
        ...

    async def start(self) -> None:
        """Start it. Raises OSError or DalSegnoError if it cannot be started."""
        ...

    async def wait(self) -> int:
        """Wait for its end; return the exit status, negative for a signal. If cancelled, kill the child."""
        ...

    @property
    def last_line(self) -> str:
        """The last line of its output."""
        ...

    def terminate(self) -> None: ...

    def kill(self, reason: str = "") -> None:
        """Kill it, and the processes it started; `reason` is recorded."""
        ...


@dataclass(slots=True)
class RoleProcess:
    """A role as a child process, in its own process group.

    The group keeps the terminal's Ctrl-C away (the launcher drains in order), and lets a kill reach the
    processes that the role started.

    Attributes:
        template: forks the process; None to execute a new program.
        ends: how the last run that was healthy ended, and the last starts since. A run gets them in its
            environment, and records them in the log.
    """

    command: Command
    console: Console
    template: Template | None = None
    last_line: str = ""
    ends: list[ProcessEnd] = field(default_factory=list)
    _run: RoleRun | None = None
    _kill_reason: str = ""
    _begun_s: float = 0.0

    @property
    def name(self) -> str:
        return self.command.name

    @property
    def pid(self) -> int | None:
        return self._run.pid if self._run is not None and self._run.runs else None

    async def start(self) -> None:
        self.last_line, self._kill_reason, self._begun_s = "", "", time.monotonic()
        command = replace(self.command, env={**self.command.env, **environment.of_ended(self.ends)})
        if self.template is not None:
            try:
                self._run = await role_runs.fork(command, self.template, self._line)
                return
            except TemplateEndedError:
                self.template = None
                self.console.say(f"{self.name} has no template any more, and starts more slowly", "warning")
        self._run = await role_runs.execute(command, self._line)

    async def wait(self) -> int:
        assert self._run is not None
        try:
            await self._run.ended.wait()
        except asyncio.CancelledError:
            self.kill()
            await self._run.ended.wait()
            raise
        if time.monotonic() - self._begun_s >= HEALTHY_S:
            self.ends.clear()
        self.ends.append(self._end(self._run))
        del self.ends[1:-_STARTS_KEPT]
        return self._run.status

    def terminate(self) -> None:
        if self._run is not None:
            role_runs.terminate(self._run)

    def kill(self, reason: str = "") -> None:
        self._kill_reason = reason
        if self._run is not None:
            role_runs.kill(self._run)

    def _end(self, run: RoleRun) -> ProcessEnd:
        status = run.status
        return ProcessEnd(
            pid=run.pid,
            ended_ns=time.time_ns(),
            status=status if status >= 0 else None,
            signal=_signal(status) if status < 0 else "",
            reason=self._kill_reason,
            last_line=_PASSWORD.sub("//", _message(self.last_line)),
        )

    def _line(self, line: bytes) -> None:
        self.console.role(self.name, line)
        if line.strip():
            self.last_line = line.decode(errors="replace").strip()


@dataclass(slots=True)
class Backoff:
    """0.2 s, doubling to 10 s; reset by a child that was healthy for 30 s."""

    first: float = 0.2
    most: float = 10.0
    healthy: float = HEALTHY_S
    _next: float = 0.0

    def after(self, lived: float) -> float:
        """The seconds to wait before the next start of a child that ran for `lived` seconds."""
        delay = self.first if lived >= self.healthy else self._next or self.first
        self._next = min(delay * 2, self.most)
        return delay


@dataclass(slots=True)
class Supervisor:
    """Keeps one child running until it is stopped.

    Attributes:
        started: called after each start, when the child has its new pid.
        since_ns: the time of the child's last start; Unix nanoseconds.
    """

    child: Child
    console: Console
    started: Callable[[], None]
    backoff: Backoff = field(default_factory=Backoff)
    since_ns: int = 0
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)
    _ended: asyncio.Event = field(default_factory=asyncio.Event)
    _killed: bool = False

    async def run(self) -> None:
        """Run until `stop`.

        Raises:
            RefusedError: the child refused its configuration.
        """
        loop = asyncio.get_running_loop()
        try:
            while not self._stopping.is_set():
                begin = loop.time()
                end = await self._run_child()
                if self._stopping.is_set():
                    return
                delay = self.backoff.after(loop.time() - begin)
                self.console.say(f"{self.child.name} {end}; it is restarted in {delay:g} s", "warning")
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), delay)
        finally:
            self._ended.set()

    async def stop(self, grace_s: float) -> None:
        """Ask the child to stop, wait up to `grace_s` seconds, then kill it."""
        self._stopping.set()
        self.child.terminate()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), grace_s)
            return
        self.console.say(f"{self.child.name} did not stop within {grace_s:g} s: killed", "warning")
        self.child.kill()
        await self._ended.wait()

    def kill(self) -> None:
        """Kill the child, and do not restart it."""
        self._stopping.set()
        self._killed = True
        self.child.kill()

    async def _run_child(self) -> str:
        """Run the child once; return how it ended."""
        self.since_ns = time.time_ns()
        try:
            await self.child.start()
        except (OSError, DalSegnoError) as error:
            return f"could not be started: {error}"
        if self._stopping.is_set():  # stopped during the start
            self.child.kill() if self._killed else self.child.terminate()
        self.started()
        status = await self.child.wait()
        if status == EX_CONFIG and not self._stopping.is_set():
            why = _message(self.child.last_line).removeprefix("Error: ")
            raise RefusedError(f"{self.child.name}: {why}")
        return _ending(status)


def _message(line: str) -> str:
    """The message in a line, which may be a JSON object."""
    with contextlib.suppress(ValueError):
        found = json.loads(line)
        if isinstance(found, dict) and "message" in found:
            return str(found["message"])
    return line


def _ending(status: int) -> str:
    return f"ended with status {status}" if status >= 0 else f"was killed by {_signal(status)}"


def _signal(status: int) -> str:
    """The name of the signal in a negative status."""
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"
