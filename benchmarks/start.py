"""How long `dalsegno serve demo` takes to be live and ready, against what its imports alone take.

    python -m benchmarks.start [ROUNDS]

Both are measured in turn, in the same run, because the machine's mood is in both. The targets: live
within a second; ready within the bare import time of torch and the modelling file, plus two seconds.
"""

import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

IMPORTS: Final = "import torch, transformers.models.qwen3.modeling_qwen3"
_LOOK_EVERY_SECONDS: Final = 0.005
_LONGEST_SECONDS: Final = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One start; seconds from the command to each event, and from Ctrl-C to the end."""

    imports: float
    live: float
    ready: float
    stop: float


def measure(data_dir: Path) -> Start:
    """Measure the bare imports, then one start and stop."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", IMPORTS], check=True)
    imports = time.monotonic() - began

    port, ready_file = _free_port(), data_dir / "ready.json"
    command = [sys.executable, "-m", "dalsegno", "serve", "demo", "--port", str(port)]
    command += ["--data-dir", str(data_dir), "--ready-file", str(ready_file)]
    with (data_dir / "terminal.txt").open("ab") as output:
        began = time.monotonic()
        launcher = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        live = _until(lambda: _answers(f"http://127.0.0.1:{port}/health/live"), launcher) - began
        ready = _until(ready_file.exists, launcher) - began
    finally:
        launcher.send_signal(signal.SIGINT)
        began = time.monotonic()
        launcher.wait()
    return Start(imports=imports, live=live, ready=ready, stop=time.monotonic() - began)


def main() -> None:
    """Measure a few rounds, and print each and the medians."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    print(f"{'imports':>9}{'live':>9}{'ready':>9}{'- imports':>11}{'stop':>9}   seconds")
    with tempfile.TemporaryDirectory() as folder:
        starts = [_shown(measure(Path(folder))) for _ in range(rounds)]
    live = statistics.median(start.live for start in starts)
    beyond = statistics.median(start.ready - start.imports for start in starts)
    print(f"median: live after {live:.2f} s (target 1), ready {beyond:.2f} s beyond the imports (target 2)")


def _shown(start: Start) -> Start:
    beyond = start.ready - start.imports
    print(
        f"{start.imports:9.2f}{start.live:9.2f}{start.ready:9.2f}{beyond:11.2f}{start.stop:9.2f}", flush=True
    )
    return start


def _until(happened: Callable[[], bool], launcher: subprocess.Popen[bytes]) -> float:
    """When it happened; another process's doing sets no event of ours, so look often."""
    deadline = time.monotonic() + _LONGEST_SECONDS
    while not happened():
        if launcher.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the deployment did not start: {launcher.args!r}")
        time.sleep(_LOOK_EVERY_SECONDS)
    return time.monotonic()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert isinstance(port, int)
        return port


if __name__ == "__main__":
    main()
