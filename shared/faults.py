"""Fault injection: instrumented points at which a test can kill, stop or delay a process.

    faults.reach("worker.chunk.acked")

does nothing (some 30 ns) in a process that is not armed. A process is armed by the path of a file in
`DALSEGNO_FAULT` (read in `dalsegno.config.environment`). The file contains one line, the command. It is read
again at every point, so a test may change the command at any time:

    worker.chunk.acked:3:kill        kill the process when it reaches the point for the third time (SIGKILL)
    worker.chunk.acked:1:stop        stop the process (SIGSTOP) until it gets SIGCONT
    worker.chunk.acked:1:wait        block the thread until the file changes

Before it executes a command, the process writes `reached ...` into the file. So a command is executed once,
by one process, even if a supervisor restarts the process with the same file. A waiting thread blocks the
whole event loop, so an action of the test (such as cutting a connection) happens exactly at that point.

An armed process logs that it is armed.
"""

import logging
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from shared.errors import ClientError

_LOGGER: Final = logging.getLogger(__name__)

POINTS: Final[Mapping[str, str]] = {
    "gateway.submission.publishing": "a request is parsed and about to be published",
    "gateway.submission.acked": "the log has the request; the client has no response yet",
    "gateway.status.sent": "the response has started",
    "gateway.chunk.relayed": "a piece of the answer is written to the socket",
    "gateway.end.relaying": "the log has the complete answer; its end is about to be sent",
    "gateway.end.relayed": "the end is written to the socket",
    "gateway.cancel.publishing": "a request has no readers left; its cancel is about to be posted",
    "gateway.cancel.published": "the cancel is posted but not acked",
    "conductor.claim.publishing": "an epoch is about to be claimed",
    "conductor.claim.published": "the claim is stored but not read back",
    "conductor.claim.read": "the conductor leads and has published nothing yet",
    "conductor.record.read": "a record of the log is read but not folded",
    "conductor.decision.made": "a record is folded; the resulting decisions are not posted",
    "conductor.decision.posted": "a decision is posted but not acked",
    "conductor.decision.acked": "a decision is stored",
    "conductor.snapshot.writing": "a snapshot is written but not in its final place",
    "conductor.lost.posted": "a worker is declared lost; the event is not acked",
    "worker.joined.posting": "all is loaded; the rank is about to join",
    "worker.joined.posted": "the rank has joined but does not know its incarnation",
    "worker.joined.read": "the rank is ready",
    "worker.order.read": "an order is read; its execution has not started",
    "worker.node.started": "an order's first node is about to run",
    "worker.token.computed": "a token is computed but not emitted",
    "worker.chunk.posted": "a chunk is posted but not acked",
    "worker.chunk.acked": "a chunk is stored",
    "worker.completed.posting": "all chunks of a step are stored; the step's report is about to be posted",
    "worker.completed.posted": "the report is posted but not acked",
    "worker.completed.acked": "the report is stored",
    "worker.stop.read": "a stop order is read but not executed",
    "worker.leaving.posting": "the worker was stopped and is idle; its leaving is about to be posted",
}
"""All points, with the state of the process there. The first word is the role."""
ACTIONS: Final = ("kill", "stop", "wait")
_MAX_LINE_BYTES: Final = 256
_POLL_EVERY_S: Final = 0.001


class FaultError(ClientError):
    """The file in `DALSEGNO_FAULT` cannot be opened, or contains no valid command."""

    code = "invalid_fault"


def arm(file: Path) -> None:
    """Execute the commands in `file`, which is created if missing, until this process ends.

    Raises:
        FaultError: the file cannot be opened, or contains no valid command.
    """
    global _trap
    try:
        trap = _Trap(file)
    except OSError as error:
        raise FaultError(f"DALSEGNO_FAULT: cannot open {file}: {error.strerror}") from error
    trap.parse(trap.line())
    _trap = trap
    _LOGGER.warning("ARMED TO FAIL, for tests only: this process executes the commands in %s", file)


def reach(point: str) -> None:
    """Execute the command for `point`, one of `POINTS`, if there is one."""
    if _trap is not None:
        _trap.reach(point)


def order(point: str, nth: int, action: str) -> str:
    """Return the line for the file.

    Raises:
        FaultError: the point or the action does not exist.
    """
    line = f"{point}:{nth}:{action}"
    _parsed(line)
    return line


class _Trap:
    """The command file, and the number of times that its point was reached."""

    def __init__(self, file: Path) -> None:
        # Not memory-mapped: a writer may truncate the file first, and reading the mapping then is a SIGBUS.
        self._descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
        self._seen = b""
        self._order: tuple[str, int, str] | None = None
        self._times = 0

    def line(self) -> bytes:
        return os.pread(self._descriptor, _MAX_LINE_BYTES, 0)

    def parse(self, line: bytes) -> None:
        """Set a new command.

        Raises:
            FaultError: the line is not a valid command.
        """
        self._seen, self._order, self._times = line, None, 0
        text = line.decode(errors="replace").strip()
        if text and not text.startswith("reached "):
            self._order = _parsed(text)

    def reach(self, point: str) -> None:
        line = self.line()
        if line != self._seen:
            try:
                self.parse(line)
            except FaultError as error:
                _LOGGER.error("%s", error.message)
        if self._order is None or self._order[0] != point:
            return
        self._times += 1
        _, nth, action = self._order
        if self._times == nth:
            self._fire(point, action)

    def _fire(self, point: str, action: str) -> None:
        reached = f"reached {point} by {os.getpid()}\n".encode()
        _LOGGER.warning("at %s: %s, by command", point, action)
        self.parse(reached)
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, reached, 0)
        match action:
            case "kill":
                signal.raise_signal(signal.SIGKILL)
            case "stop":
                signal.raise_signal(signal.SIGSTOP)
            case _:
                while self.line() == reached:
                    time.sleep(_POLL_EVERY_S)


def _parsed(text: str) -> tuple[str, int, str]:
    match text.split(":"):
        case [point, nth, action] if point in POINTS and nth.isdecimal() and action in ACTIONS:
            return point, int(nth), action
        case _:
            raise FaultError(
                f"DALSEGNO_FAULT: expected POINT:NTH:{'|'.join(ACTIONS)} with a point of "
                f"shared.faults.POINTS, found {text!r:.100}"
            )


_trap: _Trap | None = None
