"""The deployment under test: each role is its own process behind its own proxy, restarted when it dies.

    nats-server ─┬─ proxy ─ gateway-0    proxy ─ conductor-0    proxy ─ worker-0
                 └─ proxy ─ gateway-1    proxy ─ conductor-1    proxy ─ worker-1    (replicas)

Roles are restarted with the same delay as by `dalsegno serve`, but not by its code: the code under test must
not be what keeps the deployment alive. Each process has its own fault file (`shared.faults`).
"""

import asyncio
import contextlib
import os
import random
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

import httpx
import yaml

from shared import faults
from shared.log.nats import jetstream
from shared.log.nats.private_server import NatsServer, ServerStartError
from shared.subjects import Subjects
from tests import forked
from tests.chaos import rawlog
from tests.chaos.clients import Doors
from tests.chaos.ledger import Ledger
from tests.chaos.proxy import Proxy
from tests.chaos.questions import MODEL
from tests.chaos.rawlog import RawLog
from tests.forked import Forked

RESTART_S: Final = 0.2
READY_S: Final = 180.0
"""How long all of it may take to be ready: on a busy machine loading torch alone takes a minute."""
_REFUSED: Final = 78
_MOST_EXITS: Final = 20
"""So often may a role end by itself, in all rounds together, before it counts as one that never runs."""
_LOOK_S: Final = 0.05
_FRESH_S: Final = 1.6
_BEATS_S: Final = 0.8
"""Within so long everybody has beaten once."""
_PORTS: Final = range(10_240, 32_768)
"""Below the ephemeral ports: a gateway that is away must find its port free when it comes back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """The exit of a process that no signal of ours caused."""

    role: str
    status: int
    at_s: float


@dataclass(slots=True)
class Role:
    """One role: its command, its current process, its proxy, and its fault file.

    Attributes:
        kind: `gateway`, `conductor` or `worker`.
        may_run: while cleared, the role is not restarted.
        exits: the exits of its processes, except the killed ones.
    """

    name: str
    kind: str
    args: Sequence[str]
    env: dict[str, str]
    forked: bool
    proxy: Proxy
    folder: Path
    url: str = ""
    process: "asyncio.subprocess.Process | _ForkedProcess | None" = None
    may_run: asyncio.Event = field(default_factory=asyncio.Event)
    exits: list[Exit] = field(default_factory=list)
    starts: int = 0

    @property
    def pid(self) -> int | None:
        running = self.process is not None and self.process.returncode is None
        return self.process.pid if running and self.process is not None else None

    @property
    def fault(self) -> Path:
        return self.folder / f"{self.name}.fault"

    @property
    def log_file(self) -> Path:
        return self.folder / f"{self.name}.log"

    def order(self, point: str, nth: int, action: str) -> None:
        """Write a fault order."""
        self.fault.write_text(faults.order(point, nth, action))

    def disarm(self) -> None:
        self.fault.write_text("")

    @property
    def has_reached(self) -> bool:
        """True if the process has executed its order."""
        return self.fault.read_text().startswith("reached ")

    def signal(self, number: signal.Signals) -> None:
        if self.pid is not None:
            os.kill(self.pid, number)

    async def run(self) -> None:
        """Keep the role running until cancelled."""
        self.may_run.set()
        while True:
            await self.may_run.wait()
            with self.log_file.open("ab") as log:
                self.process = await self._start(log.fileno())
            self.starts += 1
            try:
                status = await self.process.wait()
            except asyncio.CancelledError:
                with contextlib.suppress(ProcessLookupError):
                    self.process.kill()
                await self.process.wait()
                raise
            if status >= 0:
                self.exits.append(Exit(role=self.name, status=status, at_s=time.monotonic()))
            await asyncio.sleep(RESTART_S)

    async def _start(self, log: int) -> "asyncio.subprocess.Process | _ForkedProcess":
        if self.forked:
            args = (*self.args, "--parent", str(forked.parent()))
            return _ForkedProcess(forked.start(*args, output=log, error=log, env=self.env))
        program = [sys.executable, "-m", "dalsegno", *self.args, "--parent", str(os.getpid())]
        return await asyncio.create_subprocess_exec(
            *program, env=self.env, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log
        )

    def last_lines(self, count: int = 12) -> str:
        with self.log_file.open(errors="replace") as file:
            return "".join(deque(file, count))


@dataclass(frozen=True, slots=True)
class _ForkedProcess:
    """A forked process, with what a role uses of asyncio's processes."""

    process: Forked

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def returncode(self) -> int | None:
        return self.process.poll()

    def kill(self) -> None:
        self.process.kill()

    async def wait(self) -> int:
        """Wait for the end; return the exit status, negative after a signal."""
        ended, loop = asyncio.Event(), asyncio.get_running_loop()
        while (status := self.process.poll()) is None:
            report = self.process.fileno()
            loop.add_reader(report, ended.set)
            try:
                await ended.wait()
            finally:
                loop.remove_reader(report)
        return status


class Bus(Protocol):
    """The servers of the log.

    Attributes:
        may_run: while cleared, a dead server is not restarted.
    """

    may_run: asyncio.Event

    @property
    def url(self) -> str: ...
    @property
    def token(self) -> str: ...
    def signal(self, number: signal.Signals) -> None: ...
    async def start(self) -> None:
        """Start the server, and create the stream."""
        ...

    async def run(self) -> None:
        """Keep the server running until cancelled."""
        ...

    async def close(self) -> None: ...


class Nats:
    """One nats-server, kept running; one thread makes its calls, because the server ends with that thread."""

    def __init__(self, folder: Path) -> None:
        self.server = NatsServer(folder)
        self.may_run = asyncio.Event()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="nats-server")

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def token(self) -> str:
        return self.server.token

    async def start(self) -> None:
        await self._start()
        self.may_run.set()
        await jetstream.provision(self.url, self.server.credentials, Subjects())

    def signal(self, number: signal.Signals) -> None:
        if (pid := self.server.pid) is not None:
            os.kill(pid, number)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            if self.server.pid is None:
                await asyncio.sleep(RESTART_S)
                await self.may_run.wait()
                with contextlib.suppress(ServerStartError):  # it was killed while it started
                    await self._start()

    async def _start(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self.server.start)

    async def close(self) -> None:
        self.signal(signal.SIGCONT)
        await asyncio.get_running_loop().run_in_executor(self._thread, self.server.stop)
        self._thread.shutdown()


@dataclass(slots=True)
class Deployment:
    """The running deployment.

    Attributes:
        ledger: the events that nats-server has acked so far.
        beats: by subject, the latest heartbeat and its time.
    """

    folder: Path
    nats: Bus
    log: RawLog
    roles: dict[str, Role]
    ledger: Ledger
    beats: dict[str, tuple[dict[str, Any], float]] = field(default_factory=dict)

    @property
    def doors(self) -> Doors:
        return Doors(
            urls=[role.url for role in self.of("gateway")],
            nats_url=self.nats.url,
            nats_token=self.nats.token,
        )

    def of(self, kind: str) -> list[Role]:
        return [role for role in self.roles.values() if role.kind == kind]

    @property
    def leader(self) -> Role | None:
        """The live conductor whose heartbeat says that it leads."""
        pids = {beat["pid"] for beat in self._fresh("conductor") if beat["state"] == "leading"}
        leading = [role for role in self.of("conductor") if role.pid in pids]
        return leading[0] if len(leading) == 1 else None

    async def wait_until_ready(self, timeout_s: float = READY_S) -> None:
        """Wait until all processes are ready.

        Raises:
            AssertionError: they are not, in time; the message names the missing ones.
        """
        deadline = time.monotonic() + timeout_s
        while missing := await self._missing():
            if time.monotonic() > deadline:
                raise AssertionError(f"not ready within {timeout_s:g} s: {'; '.join(missing)}")
            for role in self.roles.values():
                if any(one.status == _REFUSED for one in role.exits) or len(role.exits) > _MOST_EXITS:
                    raise AssertionError(f"{role.name} does not run: {role.last_lines()}")
            await asyncio.sleep(_LOOK_S)

    async def _missing(self) -> list[str]:
        missing = [f"{role.name} does not run" for role in self.roles.values() if role.pid is None]
        if self.leader is None:
            missing.append("nobody leads")
        there = {beat["pid"]: beat["state"] for beat in (*self._fresh("worker"), *self._fresh("conductor"))}
        expected = {"worker": {"ready"}, "conductor": {"leading", "following"}}
        for kind, states in expected.items():
            missing += [
                f"{role.name} is {there.get(role.pid, 'not heard')}"
                for role in self.of(kind)
                if there.get(role.pid) not in states
            ]
        if missing:
            return missing
        async with httpx.AsyncClient(timeout=2.0) as http:
            for role in self.of("gateway"):
                try:
                    answer = await http.get(f"{role.url}/health/ready")
                except httpx.HTTPError as error:
                    return [f"{role.name} does not answer ({error!r})"]
                if answer.status_code != 200:
                    return [f"{role.name}: {answer.text}"]
        return []

    async def leftovers(self, patience_s: float) -> list[str]:
        """State of requests that processes still hold some time after all requests have ended."""
        since_s = time.monotonic()
        while True:
            await asyncio.sleep(_LOOK_S)
            lasted_s = time.monotonic() - since_s
            found = self._held(since_s)
            if lasted_s > patience_s or (lasted_s > _BEATS_S and not found):
                return found

    def _held(self, since_s: float) -> list[str]:
        """The state held by the processes with a heartbeat since then."""
        found: list[str] = []
        for subject, (beat, at_s) in self.beats.items():
            tensors = beat.get("meters", {}).get("tensors", {})
            holds = {name: beat.get(name) for name in ("running", "waiting", "held", "kv_used", "open")}
            held = {name: count for name, count in {**holds, "slots": tensors.get("slots")}.items() if count}
            if at_s > since_s and held and beat.get("state") != "loading":
                found.append(f"{subject} holds {held}")
        return found

    def _fresh(self, kind: str) -> list[dict[str, Any]]:
        """The recent heartbeats of one kind of process."""
        now_s = time.monotonic()
        return [
            beat
            for subject, (beat, at_s) in self.beats.items()
            if subject.split(".")[2] == kind and now_s - at_s < _FRESH_S
        ]

    async def listen(self) -> None:
        """Receive heartbeats until cancelled."""
        async for subject, beat in self.log.beats("ds.beat.>"):
            self.beats[subject] = (beat, time.monotonic())

    def exits(self) -> list[Exit]:
        """The processes that have exited by themselves so far."""
        return [one for role in self.roles.values() for one in role.exits]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The number of processes of each role, and the model.

    Attributes:
        settings: configuration keys that override the derived ones.
        env: additional environment variables of the processes.
        forked: the processes are forked with all imports in place (`tests.forked`), not new programs.
    """

    checkpoint: Path
    gateways: int = 2
    conductors: int = 2
    workers: int = 2
    family: str = "decoder_lm"
    settings: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    forked: bool = False

    def config(self, data_dir: Path) -> dict[str, Any]:
        return {
            "model": self.family,
            "name": MODEL,
            "checkpoint": str(self.checkpoint),
            "max_seq_len": 512,
            "node_groups": [{"node_names": ["prepare", "llm"], "ranks": list(range(self.workers))}],
            "recovery": {"snapshot_every": 20},
            "data_dir": str(data_dir),
            **self.settings,
        }


@asynccontextmanager
async def deployed(
    folder: Path, shape: Shape, bus: Callable[[Path], Bus] = Nats
) -> AsyncGenerator[Deployment, None]:
    """A ready deployment in `folder`, stopped at the end of the block."""
    config = _written(folder, shape)
    nats = bus(folder / "nats")
    async with AsyncExitStack() as stack:
        stack.push_async_callback(nats.close)
        await nats.start()
        log = await stack.enter_async_context(rawlog.connected(nats.url, nats.token))
        to_ports = [int(url.rpartition(":")[2]) for url in nats.url.split(",")]
        roles: dict[str, Role] = {}
        ledger = Ledger()
        for name, kind, args, url in _commands(shape):
            proxy = await stack.enter_async_context(Proxy(*to_ports, ledger=ledger))
            env = {**shape.env, "DALSEGNO_NATS_TOKEN": nats.token}
            told = [*args, "--config", str(config), "--nats", proxy.url]
            roles[name] = Role(
                name, kind, told, _environment(folder, name) | env, shape.forked, proxy, folder, url
            )
        deployment = Deployment(folder, nats, log, roles, ledger)
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(role.run(), name=name) for name, role in roles.items()]
            running.append(tasks.create_task(nats.run(), name="nats"))
            running.append(tasks.create_task(deployment.listen(), name="beats"))
            try:
                await deployment.wait_until_ready()
                yield deployment
            finally:
                for task in running:
                    task.cancel()


def _written(folder: Path, shape: Shape) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / f"{MODEL}.yaml"
    config.write_text(yaml.safe_dump(shape.config(folder / "data")))
    return config


def _commands(shape: Shape) -> list[tuple[str, str, list[str], str]]:
    """Name, kind, arguments and address of each role; workers first, because they load longest."""
    found = [(f"worker-{n}", "worker", ["worker", "--rank", str(n)], "") for n in range(shape.workers)]
    for number in range(shape.gateways):
        port = _free_port()
        args = ["gateway", "--host", "127.0.0.1", "--port", str(port)]
        found.append((f"gateway-{number}", "gateway", args, f"http://127.0.0.1:{port}"))
    return found + [(f"conductor-{n}", "conductor", ["conductor"], "") for n in range(shape.conductors)]


def _environment(folder: Path, name: str) -> dict[str, str]:
    return {
        **{key: value for key, value in os.environ.items() if not key.startswith("DALSEGNO_")},
        "DALSEGNO_FAULT": str(folder / f"{name}.fault"),
        "OMP_WAIT_POLICY": "PASSIVE",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }


def _free_port() -> int:
    for port in random.sample(_PORTS, 50):
        with socket.socket() as one, contextlib.suppress(OSError):
            one.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port of fifty is free")
