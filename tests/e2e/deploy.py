"""Start `dalsegno serve` as a user would, and wait for its ready file."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

import msgspec

from dalsegno.config import environment
from dalsegno.serve.data_dir import Pids, RunningDeployment
from shared.log.nats.credentials import Credentials
from tests import forked

Launcher: TypeAlias = subprocess.Popen[bytes] | forked.Forked
START_SECONDS: Final = 100.0
STOP_SECONDS: Final = 60.0


@dataclass(slots=True)
class Running:
    """A ready deployment.

    `pids` is read again each time: a killed role has a new pid once it runs again.
    """

    launcher: Launcher
    data_dir: Path
    ready_file: Path
    output: Path

    @property
    def now(self) -> RunningDeployment:
        return msgspec.json.decode(self.ready_file.read_bytes(), type=RunningDeployment)

    @property
    def url(self) -> str:
        return self.now.url

    @property
    def nats_url(self) -> str:
        return self.now.nats_url

    @property
    def client(self) -> Credentials:
        """The credentials of a service."""
        return Credentials(**self.now.nats_client)

    @property
    def reader(self) -> Credentials:
        """The credentials of a reader of the log."""
        return Credentials(**self.now.nats_reader)

    def shown_by(self, pid: int) -> Credentials:
        """The credentials of a role; only the same user can read them."""
        told = Path(f"/proc/{pid}/environ").read_text().split("\0")
        [seed] = [line.partition("=")[2] for line in told if line.startswith(f"{environment.NATS_SEED}=")]
        return Credentials(seed=seed)

    @property
    def prefix(self) -> str:
        return self.now.prefix

    @property
    def pids(self) -> Pids:
        return self.now.pids

    def all_pids(self) -> list[int]:
        """All its processes, including the launcher."""
        pids = self.pids
        roles = [*pids.gateway, *pids.conductor, *pids.worker.values()]
        return [self.launcher.pid, *roles, *([pids.nats] if pids.nats is not None else [])]

    def stop(self) -> int:
        """Press Ctrl-C, and wait for the end; return the exit status."""
        self.launcher.send_signal(signal.SIGINT)
        return self.launcher.wait(STOP_SECONDS)

    def log(self) -> str:
        """Its terminal output so far."""
        return self.output.read_text(errors="replace")


@contextmanager
def serve(
    folder: Path, *args: str, model: str = "demo", env: dict[str, str] | None = None, as_program: bool = False
) -> Iterator[Running]:
    """Run `dalsegno serve MODEL ARGS` with its data dir in `folder` until the end of the block.

    A second start on the same `folder` is the same deployment. With `as_program`, the launcher and its roles
    are new programs, which is slow; otherwise they are forked (`tests.forked`).
    """
    ready_file, output, data_dir = folder / "ready.json", folder / "terminal.txt", folder / "data"
    command = ["serve", model, "--port", "0", *args]
    command += ["--data-dir", str(data_dir), "--ready-file", str(ready_file)]
    command += ["--set", "recovery.templates=false"] if as_program else []
    around = {**os.environ, **(env or {})}
    ready_file.unlink(missing_ok=True)
    with output.open("ab") as file:
        launcher: Launcher
        if as_program:
            program = [sys.executable, "-m", "dalsegno", *command]
            launcher = subprocess.Popen(program, stdout=file, stderr=file, env=around)
        else:
            launcher = forked.start(*command, output=file.fileno(), error=file.fileno(), env=around)
    running = Running(launcher, data_dir, ready_file, output)
    try:
        _wait_until_ready(running)
        yield running
    finally:
        if launcher.poll() is None:
            try:
                running.stop()
            except subprocess.TimeoutExpired:
                launcher.kill()  # its roles die with it
                launcher.wait()
                raise


def _wait_until_ready(running: Running) -> None:
    """Poll for the ready file, because another process writes it."""
    deadline = time.monotonic() + START_SECONDS
    while not running.ready_file.exists():
        if running.launcher.poll() is not None or time.monotonic() > deadline:
            raise AssertionError(f"the deployment did not become ready:\n{running.log()}")
        time.sleep(0.02)
