"""One run of a role's process: executed as a new program, or forked by a template.

Both send their output line by line, and tell their end when the process is gone and its output is read: the
last line often says why it ended.
"""

import asyncio
import contextlib
import os
import signal
from asyncio.subprocess import DEVNULL, PIPE, STDOUT
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

from dalsegno.templates.order import REPORT, STATUS_UNKNOWN, Order
from dalsegno.templates.template import Template

_LINE_BYTES: Final = 2**16
"""A longer line is cut into several, so that an endless line does not fill the launcher's memory."""

OnLine: TypeAlias = Callable[[bytes], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """The command line of a role.

    Attributes:
        program: the interpreter and the module that a new program begins with.
        args: the arguments of that module; the parent's process id is appended to them.
    """

    name: str
    program: tuple[str, ...]
    args: tuple[str, ...]
    env: Mapping[str, str]


class RoleRun(Protocol):
    """A started process.

    Attributes:
        pid: its process id, which is also that of its process group.
        runs: False from its end.
        status: its exit status, negative for a signal; only after its end.
        ended: set when the process is gone and its output is read.
    """

    @property
    def pid(self) -> int: ...
    @property
    def runs(self) -> bool: ...
    @property
    def status(self) -> int: ...
    @property
    def ended(self) -> asyncio.Event: ...


class TemplateEndedError(Exception):
    """The template has ended, or cannot fork."""


async def execute(command: Command, line: OnLine) -> RoleRun:
    """Start a role as a new program.

    Raises:
        OSError: it cannot be started.
    """
    _, run = await asyncio.get_running_loop().subprocess_exec(
        lambda: _Executed(line),
        *command.program,
        *_args(command, os.getpid()),
        env=dict(command.env),
        stdin=DEVNULL,
        stdout=PIPE,
        stderr=STDOUT,
        process_group=0,
    )
    return run


async def fork(command: Command, template: Template, line: OnLine) -> RoleRun:
    """Have a role's process forked.

    Raises:
        TemplateEndedError: the template has ended.
    """
    run = _Forked(line)
    wanted = Order(name=command.name, args=_args(command, template.pid), env=dict(command.env))
    output, their_output = os.pipe()
    nothing = os.open(os.devnull, os.O_RDONLY)
    try:
        report = template.start(wanted, [nothing, their_output, their_output])
    except OSError as error:
        os.close(output)
        raise TemplateEndedError from error
    finally:
        os.close(nothing)
        os.close(their_output)
    loop = asyncio.get_running_loop()
    with contextlib.ExitStack() as unread:
        source = unread.enter_context(os.fdopen(output, "rb", buffering=0))
        await loop.connect_read_pipe(lambda: run.reports, os.fdopen(report, "rb", buffering=0))
        await run.reports.forked.wait()
        if not run.reports.values:
            raise TemplateEndedError
        unread.pop_all()
    # Read last, so that the caller knows the process before its first line.
    await loop.connect_read_pipe(lambda: run.output, source)
    return run


def terminate(run: RoleRun) -> None:
    """Ask a process to stop."""
    if run.runs:
        with contextlib.suppress(ProcessLookupError):
            os.kill(run.pid, signal.SIGTERM)


def kill(run: RoleRun) -> None:
    """Kill a process, and the processes it started."""
    if run.runs:
        _kill_group(run.pid)


def _args(command: Command, parent: int) -> tuple[str, ...]:
    return (*command.args, "--parent", str(parent))


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


class _Lines:
    """Cuts output into lines."""

    def __init__(self, line: OnLine) -> None:
        self._line = line
        self._rest = b""

    def feed(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._line(line)
        if len(self._rest) >= _LINE_BYTES:
            self.end()

    def end(self) -> None:
        """The rest is a line too."""
        if self._rest:
            self._line(self._rest)
        self._rest = b""


class _Executed(asyncio.SubprocessProtocol):
    """A run as a new program, which is this process's child."""

    transport: asyncio.SubprocessTransport

    def __init__(self, line: OnLine) -> None:
        self._ended = asyncio.Event()
        self._lines = _Lines(line)

    @property
    def ended(self) -> asyncio.Event:
        return self._ended

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

    # ---- called by the event loop --------------------------------------------------------------------
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.SubprocessTransport)
        self.transport = transport

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self._lines.feed(data)

    def process_exited(self) -> None:
        _kill_group(self.pid)  # remaining children would hold the output open

    def connection_lost(self, exc: Exception | None) -> None:
        self._lines.end()
        self.transport.close()
        self.ended.set()


class _Forked:
    """A run that a template forked. The template is its parent, and kills what it leaves."""

    def __init__(self, line: OnLine) -> None:
        self.ended: Final = asyncio.Event()
        self.output: Final = _Output(_Lines(line), self._on_end)
        self.reports: Final = _Reports(self._on_end)

    @property
    def pid(self) -> int:
        return self.reports.values[0]

    @property
    def runs(self) -> bool:
        return self.reports.status is None

    @property
    def status(self) -> int:
        assert self.reports.status is not None
        return self.reports.status

    def _on_end(self) -> None:
        if self.output.is_read and not self.runs:
            self.ended.set()


class _Output(asyncio.Protocol):
    """The output of a forked process."""

    def __init__(self, lines: _Lines, on_end: Callable[[], None]) -> None:
        self.is_read = False
        self._lines = lines
        self._on_end = on_end

    def data_received(self, data: bytes) -> None:
        self._lines.feed(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lines.end()
        self.is_read = True
        self._on_end()


class _Reports(asyncio.Protocol):
    """The reports of a template on one process: its id, then its status.

    Attributes:
        forked: set when the process is there, or will never be.
        status: the exit status, from the process's end.
    """

    def __init__(self, on_end: Callable[[], None]) -> None:
        self.forked: Final = asyncio.Event()
        self.status: int | None = None
        self._data = b""
        self._on_end = on_end

    @property
    def values(self) -> list[int]:
        return [value for (value,) in REPORT.iter_unpack(self._data)]

    def data_received(self, data: bytes) -> None:
        self._data += data
        self.forked.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.status = self.values[1] if len(self.values) > 1 else STATUS_UNKNOWN
        self.forked.set()
        self._on_end()
