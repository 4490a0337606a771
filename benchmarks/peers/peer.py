"""A peer's process: start, requests, sleep during the turns of others, end.

All peers stay loaded, because a start takes minutes. A sleeping peer is stopped by a signal, with all its
processes, so that it uses only memory. Linux only (`/proc`).
"""

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final

from benchmarks.peers.protocol import Answer

ROOT: Final = Path(__file__).parents[2]
_START_S: Final = 900.0
_ANSWER_S: Final = 900.0
_STOP_S: Final = 90.0
_ON_THE_CPU: Final = {"CUDA_VISIBLE_DEVICES": ""}
"""Hides the GPU: only some peers would use it."""
_LOOK_EVERY_S: Final = 0.001
_ASLEEP: Final = frozenset("TtZX")
"""States of processes that are stopped or ended."""
_LINES_TOLD: Final = 12


class PeerFailedError(Exception):
    """A peer failed at its start or at a request. The message has its last output and the path of its log."""


@dataclass(slots=True)
class Peer:
    """One participant.

    Attributes:
        name: its name in the report.
        command: the interpreter of its environment, its script, and the checkpoint.
        said: the file of its output.
        ready_s: seconds from its start until it was ready for requests.
        how: the command or call by which a user would start it.
        versions: versions of its packages.
    """

    name: str
    command: Sequence[str]
    said: Path
    ready_s: float = 0.0
    how: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    _process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it is ready for requests.

        Raises:
            PeerFailedError: it could not be started.
        """
        begun_s = time.perf_counter()
        self.said.parent.mkdir(parents=True, exist_ok=True)
        with self.said.open("wb") as file:
            self._process = subprocess.Popen(
                self.command,
                cwd=ROOT,
                env=os.environ | _ON_THE_CPU,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                bufsize=0,
            )
        ready = self._reply("ready", _START_S)
        self.ready_s = time.perf_counter() - begun_s
        self.how, self.versions = ready["command"], ready["versions"]

    def ask(self, prompts: list[list[int]], max_tokens: int) -> list[Answer]:
        """Send all prompts at the same time and return the answers.

        Raises:
            PeerFailedError: it ended, failed, or took more than a quarter of an hour.
        """
        line = json.dumps({"prompts": prompts, "max_tokens": max_tokens}) + "\n"
        try:
            _pipe(self._running.stdin).write(line.encode())
        except BrokenPipeError:
            raise self._failed("it ended between two requests") from None
        return [Answer(**answer) for answer in self._reply("answers", _ANSWER_S)]

    def sleep(self) -> None:
        """Stop all its processes until it is woken, including those that it is starting."""
        while awake := [pid for pid in _tree(self._running.pid) if _state(pid) not in _ASLEEP]:
            for pid in awake:
                _send(pid, signal.SIGSTOP)
            time.sleep(_LOOK_EVERY_S)

    def wake(self) -> None:
        for pid in _tree(self._running.pid):
            _send(pid, signal.SIGCONT)

    def stop(self) -> None:
        """Let it end; kill its remaining processes."""
        if self._process is None:
            return
        self.wake()
        below = _tree(self._process.pid)
        _pipe(self._process.stdin).close()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            for pid in below:
                _send(pid, signal.SIGKILL)
            self._process.wait()
        _pipe(self._process.stdout).close()
        self._process = None

    @property
    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError(f"{self.name} was not started")
        return self._process

    def _reply(self, expected: str, within_s: float) -> Any:
        output = _pipe(self._running.stdout)
        if not select.select([output], [], [], within_s)[0]:
            raise self._failed(f"expected a message within {within_s:.0f} s, found none")
        line = output.readline()
        if not line:
            raise self._failed(f"it ended with {self._running.wait()}")
        found = json.loads(line)
        if expected not in found:
            raise self._failed(found.get("failed", f"expected {expected!r}, found {line!r}"))
        return found[expected]

    def _failed(self, why: str) -> PeerFailedError:
        last = self.said.read_text(errors="replace").splitlines()[-_LINES_TOLD:]
        return PeerFailedError(
            "\n".join([why.rstrip(), f"its output is in {self.said}; the last lines:", *last])
        )


def _pipe(end: IO[bytes] | None) -> IO[bytes]:
    assert end is not None  # requested at the start
    return end


def _send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # it may have ended meanwhile
        os.kill(pid, number)


def _stat(pid: int) -> list[str]:
    """The fields of a process's stat: state, parent, and more; a placeholder if it ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ["X", "0"]


def _state(pid: int) -> str:
    return _stat(pid)[0]


def _tree(pid: int) -> list[int]:
    """The process and all its descendants, parents first."""
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
    parents = {each: int(_stat(each)[1]) for each in pids}
    found = [pid]
    for each in found:
        found += [child for child, parent in parents.items() if parent == each]
    return found
