"""`dalsegno` commands that begin with all imports in place: a template of the test run forks them.

Importing is most of what a short command does, and four fifths of the start of a small deployment. The
processes are real ones, with their own environment, signals and exit status; only how they begin differs:

- Their sets have the same order in every process of a run, because they share the seed of Python's hashes.
- A role's environment is not in `/proc`. Tests that read it there set `recovery.templates` to false.
- A variable that a library reads while it is imported has the value of the test run.

`tests.e2e.deploy.serve(..., as_program=True)` starts new programs instead; so does `make test-packages`.
"""

import atexit
import importlib
import importlib.util
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Final

from dalsegno import cli
from dalsegno.config import resolve
from dalsegno.serve import role_imports
from dalsegno.templates import forking
from dalsegno.templates.order import REPORT, STATUS_UNKNOWN, Order
from dalsegno.templates.template import Template, work
from models import registry

_ROOT: Final = Path(__file__).parents[1]


@dataclass(slots=True)
class Forked:
    """A running command, with the methods of `subprocess.Popen` that tests use."""

    args: tuple[str, ...]
    pid: int
    returncode: int | None = None
    _report: int = field(repr=False, default=-1)

    def poll(self) -> int | None:
        return self._wait(0)

    def wait(self, timeout: float | None = None) -> int:
        status = self._wait(timeout)
        if status is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def fileno(self) -> int:
        """The file that is readable once the process has ended; closed when `returncode` is known."""
        return self._report

    def _wait(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._report], [], [], timeout)[0]:
            self.returncode = _read(self._report, STATUS_UNKNOWN)
            os.close(self._report)
        return self.returncode


def start(*args: str, output: int, error: int, env: dict[str, str], cwd: Path | None = None) -> Forked:
    """Start `dalsegno ARGS`, with all of its environment and no input."""
    sys.audit("os.fork")  # the fast lane refuses it (tests/conftest.py)
    replaced = [folder for folder in _path(env) if folder != _ROOT and (folder / "models").exists()]
    assert not replaced, f"{replaced} has other sources than those imported: pass as_program=True"
    order = Order(name="dalsegno", args=args, env=env, cwd=str(cwd or Path.cwd()))
    with Path(os.devnull).open("rb") as nothing:
        report = _template().start(order, [nothing.fileno(), output, error])
    pid = _read(report, 0)
    assert pid, "the template of the test run has ended"
    return Forked(args, pid, _report=report)


def parent() -> int:
    """The process that is the parent of all commands: the template of this test process."""
    return _template().pid


def run(
    *args: str, env: dict[str, str], cwd: Path | None, timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """Run `dalsegno ARGS`, with any exit status."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as error:
        process = start(*args, output=output.fileno(), error=error.fileno(), env=env, cwd=cwd)
        try:
            status = process.wait(timeout_s)
        except BaseException:
            process.kill()
            process.wait()
            raise
        output.seek(0)
        error.seek(0)
        return subprocess.CompletedProcess(args, status, output.read().decode(), error.read().decode())


def _read(report: int, otherwise: int) -> int:
    """Wait for the next number of a report."""
    data = os.read(report, REPORT.size)
    return int(REPORT.unpack(data)[0]) if data else otherwise


@cache
def _template() -> Template:
    """The template of this process: started at the first use, ended with the test run."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.forked", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            cwd=_ROOT,
            env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE", "PYTHONUNBUFFERED": "1"},
            process_group=0,
        )
    atexit.register(process.wait)
    atexit.register(ours.close)  # first: it ends the template
    return Template(process.pid, ours)


def _imports() -> None:
    """Import what launchers, roles and commands need."""
    for location in {location for section in cli.COMMANDS.values() for location in section.values()}:
        importlib.import_module(location.partition(":")[0])
    for module in ("dalsegno.serve.assembly",):
        importlib.import_module(module)
    for imports in role_imports.of_roles(resolve.effective("demo", []).config).values():
        imports()
    torch = importlib.import_module("torch")
    if not torch.backends.cuda.is_built() and importlib.util.find_spec("diffusers") is not None:
        # 2.4 s of CPU in each rank of a pipeline. It looks for GPUs, which no forked process could use then.
        importlib.import_module("diffusers.pipelines.pipeline_utils")
    for family in registry.families():  # looked through for the one that claims a checkpoint
        registry.graph(family)


def _path(env: dict[str, str]) -> list[Path]:
    return [Path(folder) for folder in env.get("PYTHONPATH", "").split(os.pathsep) if folder]


def _take_path(order: Order) -> None:
    """Follow PYTHONPATH, which a new program would have read."""
    for folder in map(str, reversed(_path(order.env))):
        if folder not in sys.path:
            sys.path.insert(1, folder)
    importlib.invalidate_caches()


def _main(control: int) -> None:
    order = work(socket.socket(fileno=control), _imports)
    _take_path(order)
    forking.call_and_end(lambda: cli.main(order.args))


if __name__ == "__main__":
    _main(int(sys.argv[1]))
