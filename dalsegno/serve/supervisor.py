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
import os
import signal
import time
from asyncio.subprocess import DEVNULL, PIPE, STDOUT
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from dalsegno.exit_status import EX_CONFIG
from dalsegno.terminal.console import Console
from shared.errors import ClientError, DalSegnoError

_LINE_BYTES: Final = 2**16
"""A longer line is cut into several, so that an endless line does not fill the launcher's memory."""


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

    def kill(self) -> None:
        """Kill it, and the processes it started."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """The command line of a role."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]


@dataclass(slots=True)
class RoleProcess:
    """A role as a child process, in its own process group.

    The group keeps the terminal's Ctrl-C away (the launcher drains in order), and lets a kill reach the
    processes that the role started.
    """

    command: Command
    console: Console
    last_line: str = ""
    _run: "_ProcessRun | None" = None

    @property
    def name(self) -> str:
        return self.command.name

    @property
    def pid(self) -> int | None:
        return self._run.pid if self._run is not None and self._run.runs else None

    async def start(self) -> None:
        _, self._run = await asyncio.get_running_loop().subprocess_exec(
            lambda: _ProcessRun(self._line),
            *self.command.argv,
            env=dict(self.command.env),
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=STDOUT,
            process_group=0,
        )

    async def wait(self) -> int:
        assert self._run is not None
        try:
            await self._run.ended.wait()
        except asyncio.CancelledError:
            self.kill()
            await self._run.ended.wait()
            raise
        return self._run.status

    def terminate(self) -> None:
        if self._run is not None and self._run.runs:
            self._run.transport.terminate()

    def kill(self) -> None:
        if self._run is not None and self._run.runs:
            self._run.kill_group()

    def _line(self, line: bytes) -> None:
        self.console.role(self.name, line)
        if line.strip():
            self.last_line = line.decode(errors="replace").strip()


class _ProcessRun(asyncio.SubprocessProtocol):
    """One run of a role's process: its output by lines, and its end.

    `ended` is set when the process is gone and its output is read: the last line often says why.
    """

    transport: asyncio.SubprocessTransport

    def __init__(self, line: Callable[[bytes], None]) -> None:
        self.ended = asyncio.Event()
        self._line = line
        self._rest = b""

    @property
    def pid(self) -> int:
        return self.transport.get_pid()

    @property
    def runs(self) -> bool:
        return self.transport.get_returncode() is None

    @property
    def status(self) -> int:
        status = self.transport.get_returncode()
        assert status is not None
        return status

    def kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    # ---- called by the event loop --------------------------------------------------------------------
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.SubprocessTransport)
        self.transport = transport

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._line(line)
        if len(self._rest) >= _LINE_BYTES:
            self._line(self._rest)
            self._rest = b""

    def process_exited(self) -> None:
        self.kill_group()  # remaining children would hold the output open

    def connection_lost(self, exc: Exception | None) -> None:
        if self._rest:
            self._line(self._rest)
        self.transport.close()
        self.ended.set()


@dataclass(slots=True)
class Backoff:
    """0.2 s, doubling to 10 s; reset by a child that was healthy for 30 s."""

    first: float = 0.2
    most: float = 10.0
    healthy: float = 30.0
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
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"
