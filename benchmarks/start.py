"""Time until `dalsegno serve demo` is live and ready, compared with the time of its imports alone.

Both are measured in turns, because the load of the machine affects both. Targets: live within a second; ready
within the import time of torch and the modelling file plus two seconds.
"""

import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

from benchmarks.report import RATIO, Figure, spread
from dalsegno.config.address import free

ROUNDS: Final = 3
ALLOWED_S: Final = 2.0
_IMPORTS: Final = (
    "import time; begun = time.perf_counter(); import torch; "
    "from transformers.models.qwen3 import modeling_qwen3; print(time.perf_counter() - begun)"
)
_LOOK_EVERY_S: Final = 0.005
_LONGEST_S: Final = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Start:
    """One start: seconds from the command to each event, and from Ctrl-C to the end."""

    imports: float
    live: float
    ready: float
    stop: float


def measure() -> list[Figure]:
    with tempfile.TemporaryDirectory(prefix="dalsegno-bench-") as folder:
        _, *starts = [_once(Path(folder)) for _ in range(ROUNDS + 1)]  # the first warms the file cache
    imports, lives, readies, stops = zip(*((s.imports, s.live, s.ready, s.stop) for s in starts), strict=True)
    beyond = [start.ready - start.imports for start in starts]
    allowed = median(imports) + ALLOWED_S
    return [
        Figure("start: ready / (imports alone + 2 s)", median(readies) / allowed, RATIO, "target: at most 1"),
        spread("live", lives, "s", "target: at most 1"),
        spread("ready", readies, "s"),
        spread("imports of torch and the modelling file alone", imports, "s"),
        spread("ready, beyond the imports", beyond, "s", f"target: at most {ALLOWED_S:g}"),
        spread("stopped, after Ctrl-C", stops, "s"),
    ]


def _once(folder: Path) -> _Start:
    """Measure the imports alone, then one start and stop."""
    bare = subprocess.run((sys.executable, "-c", _IMPORTS), capture_output=True, text=True, check=True)
    [listen], ready_file = free("127.0.0.1", 0), folder / "ready.json"
    command = [sys.executable, "-m", "dalsegno", "serve", "demo", "--port", str(listen.port)]
    command += ["--data-dir", str(folder / "data"), "--ready-file", str(ready_file)]
    with (folder / "terminal.txt").open("ab") as output:
        began = time.monotonic()
        launcher = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        live = _until(lambda: _answers(listen.port), launcher) - began
        ready = _until(ready_file.exists, launcher) - began
    finally:
        launcher.send_signal(signal.SIGINT)
        told = time.monotonic()
        launcher.wait()
    return _Start(imports=float(bare.stdout), live=live, ready=ready, stop=time.monotonic() - told)


def _until(happened: Callable[[], bool], launcher: subprocess.Popen[bytes]) -> float:
    """Poll until a condition of another process holds; return the time."""
    deadline = time.monotonic() + _LONGEST_S
    while not happened():
        if launcher.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the deployment did not start: {launcher.args!r}")
        time.sleep(_LOOK_EVERY_S)
    return time.monotonic()


def _answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), 5) as connection:
            connection.sendall(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            return connection.recv(64).startswith(b"HTTP/1.1 200")
    except OSError:
        return False
