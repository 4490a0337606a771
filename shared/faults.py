"""Instrumented points: places where a process can be told to die, stop or wait, for tests of what follows.

    faults.reach("worker.chunk.acked")

is a call that does nothing, some 30 ns, in every process that was not armed. One is armed by the path of a
file in `DALSEGNO_FAULT` (read in `dalsegno.config.environment`). The file holds an order, one line, and may
be given another at any time; it is read anew at every point:

    worker.chunk.acked:3:kill        the third time this process gets there from now on, it is gone (SIGKILL)
    worker.chunk.acked:1:stop        it stops (SIGSTOP) until somebody lets it go on (SIGCONT)
    worker.chunk.acked:1:wait        the thread that gets there waits until the file says something else

Before it does so the process writes into the file that it is there (`reached ...`): an order is obeyed once,
by one process, also where a supervisor starts it again with the same file. Who waits holds up its whole event
loop, so what an observer does then (cut a connection, say) is done at that very point and not near it.

A testing aid: an armed process says so in its log, and nobody arms one by accident.
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
    "gateway.submission.publishing": "a request is parsed, and about to be published",
    "gateway.submission.acked": "the log has the request; its client knows nothing yet",
    "gateway.status.sent": "the response has begun",
    "gateway.chunk.relayed": "a piece of the answer was handed to the server's socket",
    "gateway.end.relaying": "the answer is complete on the log, and its end about to be told",
    "gateway.end.relayed": "the end was handed to the server's socket",
    "gateway.cancel.publishing": "nobody wants a request any more, and its cancel is about to be posted",
    "gateway.cancel.published": "the cancel is posted, and not acked",
    "conductor.claim.publishing": "an epoch is about to be claimed",
    "conductor.claim.published": "the claim is stored, and not read back",
    "conductor.claim.read": "it leads from here on, and has published nothing yet",
    "conductor.record.read": "a record of the log is read, and not folded",
    "conductor.decision.made": "a record is folded; what follows from it is not posted",
    "conductor.decision.posted": "a decision is posted, and not acked",
    "conductor.decision.acked": "a decision is stored",
    "conductor.snapshot.writing": "a snapshot is written, and not in its place",
    "conductor.lost.posted": "a worker's life was declared over; not acked",
    "worker.joined.posting": "all is loaded, and the rank about to join",
    "worker.joined.posted": "the rank has joined, and does not know its incarnation",
    "worker.joined.read": "the rank is ready",
    "worker.order.read": "an order is read, and nothing of it done",
    "worker.node.started": "an order's first node is about to run",
    "worker.token.computed": "a token is computed, and nothing of it put out",
    "worker.chunk.posted": "a chunk is posted, and not acked",
    "worker.chunk.acked": "a chunk is stored",
    "worker.completed.posting": "all chunks of a step are stored; the step's report is about to be posted",
    "worker.completed.posted": "the report is posted, and not acked",
    "worker.completed.acked": "the report is stored",
    "worker.stop.read": "a stop is read, and not obeyed",
    "worker.leaving.posting": "told to end, nothing runs any more; the last word is about to be posted",
}
"""Every point, and where its process is then. The first word is the role's."""
ACTIONS: Final = ("kill", "stop", "wait")
_SIZE: Final = 256
"""A line has no more bytes."""
_LOOK_EVERY_S: Final = 0.001


class FaultError(ClientError):
    """The file named by `DALSEGNO_FAULT` cannot be used, or holds no order."""

    code = "invalid_fault"


def arm(file: Path) -> None:
    """Obey the orders in `file`, made where it is not there, for the rest of this process's life.

    Raises:
        FaultError: it cannot be opened, or holds something else.
    """
    global _trap
    try:
        trap = _Trap(file)
    except OSError as error:
        raise FaultError(f"DALSEGNO_FAULT: cannot open {file}: {error.strerror}") from error
    trap.parse(trap.line())
    _trap = trap
    _LOGGER.warning("ARMED TO FAIL, for tests alone: this process obeys what %s orders", file)


def reach(point: str) -> None:
    """This process is at `point`, one of `POINTS`."""
    if _trap is not None:
        _trap.reach(point)


def order(point: str, nth: int, action: str) -> str:
    """What to write into the file.

    Raises:
        FaultError: no such point or action.
    """
    line = f"{point}:{nth}:{action}"
    _parsed(line)
    return line


class _Trap:
    """The file, and how often the point it names was reached."""

    def __init__(self, file: Path) -> None:
        # Not mapped: whoever writes the file anew may truncate it first, and a map of that is a SIGBUS.
        self._descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
        self._seen = b""
        self._order: tuple[str, int, str] | None = None
        self._times = 0

    def line(self) -> bytes:
        return os.pread(self._descriptor, _SIZE, 0)

    def parse(self, line: bytes) -> None:
        """Take a new order.

        Raises:
            FaultError: it is none.
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
        said = f"reached {point} by {os.getpid()}\n".encode()
        _LOGGER.warning("at %s, as ordered: %s", point, action)
        self.parse(said)
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, said, 0)
        match action:
            case "kill":
                signal.raise_signal(signal.SIGKILL)
            case "stop":
                signal.raise_signal(signal.SIGSTOP)
            case _:
                while self.line() == said:
                    time.sleep(_LOOK_EVERY_S)


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
