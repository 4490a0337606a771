"""The process that tries grammars (`models.text.guide_trial`), as its parent uses it.

It starts with the first trial, and starts again when it has been lost. It ends when this object is no longer
referenced, or with this process, because its standard input is closed then.
"""

import json
import os
import select
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Final

from models.text import guide_trial
from models.text.guide_trial import Verdict
from shared.errors import CapacityError

_WALL_S: Final = 20.0
"""Time limit of a trial. One that exceeds it got too little processor time; that is not the guide's fault."""
_READ_BYTES: Final = 1 << 16


class TrialProcess:
    """Tries one grammar at a time, in another process. Thread-safe.

    Args:
        marks: the names of the special tokens, which a grammar may name.
    """

    def __init__(self, marks: Sequence[str]) -> None:
        self._marks = list(marks)
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize[..., TrialProcess] | None = None

    def verdict_of(self, grammar: str) -> Verdict:
        """Try a grammar. It blocks until the trial has ended, for at most `_WALL_S`.

        Raises:
            CapacityError: the process could not be started, was lost, or got too little processor time.
        """
        with self._lock:
            try:
                if self._process is None:
                    self._start()
                assert self._process is not None
                _write(self._process, grammar)
                verdict: Verdict = json.loads(_read_line(self._process))
            except (OSError, EOFError, TimeoutError, ValueError) as error:
                self._end()
                reason = str(error) or "the process of trials was lost"
                raise CapacityError(
                    f"the guide could not be tried: {reason}; try again later", code="guide_not_tried"
                ) from error
            return verdict

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end()

    def _start(self) -> None:
        process = subprocess.Popen(
            [sys.executable, "-I", str(Path(guide_trial.__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # so that a running trial ends with it
        )
        self._process = process
        self._finalizer = weakref.finalize(self, _kill, process)
        _write(process, self._marks)

    def _end(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self._process = self._finalizer = None


def _write(process: "subprocess.Popen[bytes]", value: object) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(value).encode() + b"\n")
    process.stdin.flush()


def _read_line(process: "subprocess.Popen[bytes]") -> bytes:
    """Read a line of the process's output; it writes the next one only after another task."""
    assert process.stdout is not None
    poller = select.poll()
    poller.register(process.stdout, select.POLLIN)
    line, end_s = b"", time.monotonic() + _WALL_S
    while not line.endswith(b"\n"):
        if not poller.poll(max(0.0, end_s - time.monotonic()) * 1e3):
            raise TimeoutError(f"it did not end within {_WALL_S:g} s, because the processors are busy")
        part = os.read(process.stdout.fileno(), _READ_BYTES)
        if not part:
            raise EOFError
        line += part
    return line


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """End the process and its running trial."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()
