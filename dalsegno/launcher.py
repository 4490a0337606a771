"""The embedded deployment: `dalsegno serve MODEL` runs everything on one machine.

    launcher ─┬─ nats-server      private: loopback, random token, its log under the data dir
              ├─ worker-<rank>    one per rank; first, because it has the most to load
              ├─ conductor
              └─ gateway          HTTP on --host and --port

All are processes of their own, started at once; each waits for what it needs. One that dies starts
again, with back-off; one that refuses its configuration stops the deployment with its message
and status. SIGTERM or Ctrl-C drains from the bottom of the picture to the top: the gateway finishes its
streams while all others still work, and the log goes last. A second one kills.

The launcher knows processes and addresses. It knows no events, and decides nothing about requests.
"""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from dalsegno import address, configuration, datadir, environment, health, neighbour
from dalsegno.address import Listen
from dalsegno.console import Console
from dalsegno.datadir import DataDir, Deployment, Pids
from dalsegno.layers import Setting
from dalsegno.private_nats import PrivateNats
from dalsegno.signals import Echo
from dalsegno.supervisor import Child, Command, RefusedError, RoleProcess, Supervisor
from dalsegno.welcome import welcome
from shared.config import DeploymentConfig, nats_token
from shared.errors import ClientError, DalSegnoError
from shared.log.server import NatsServer
from shared.models import registry

GRACE_S: Final = 10.0
"""How long a process may take to stop; a gateway, once its running streams have had their time."""
_PROVISION_S: Final = 30.0
"""For how long the private server may be away (it is being restarted) while the streams are made."""
_LOOK_EVERY_S: Final = 0.05
_SAY_EVERY_S: Final = 2.0
"""How often it is said what a start still waits for: a big checkpoint loads for minutes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """What `dalsegno serve` is told.

    Attributes:
        model: a name in `configs/`, a YAML file, or a checkpoint folder.
        told: what the flags say of the configuration.
        ready_file: receives a `Deployment` as JSON once all is ready.
    """

    model: str
    told: Sequence[Setting]
    ready_file: Path | None


def serve(options: ServeOptions) -> None:
    """Run a deployment until told to stop.

    Raises:
        RefusedError: a role refused its configuration, or would.
        DalSegnoError: it cannot run; nothing is left running.
    """
    began_s = time.monotonic()
    found = configuration.effective(options.model, options.told)
    try:
        configuration.check(found)
    except ClientError as error:  # a role would refuse it, minutes later
        raise RefusedError(error.message) from error
    config = found.config
    data = data_dir_of(config)
    # Locked first: who starts the same thing twice is told so, and the files are left to whom they belong.
    with data.lock() as hold:
        listen = address.free(config.gateway.host, config.gateway.port)
        for file in described_in(options, data):
            _forget(file)
        colours = sys.stderr.isatty() and environment.read().colours
        console = Console(
            data.logs, colours=colours, is_json=config.logs.format == "json", level=config.logs.level
        )

        def ready() -> None:
            hold.is_used = True
            graph, took_s = registry.graph(config.model), time.monotonic() - began_s
            console.show(
                welcome(config.name, listen, data.path, took_s, outputs=graph.outputs, voices=graph.voices)
            )

        with contextlib.closing(console):
            asyncio.run(_serve(options, config, listen, data, console, ready))


async def _serve(
    options: ServeOptions,
    config: DeploymentConfig,
    listen: Listen,
    data: DataDir,
    console: Console,
    ready: Callable[[], None],
) -> None:
    nats = PrivateNats(NatsServer(data.nats)) if config.nats.url is None else None
    try:
        url, token = await _start(nats) if nats is not None else await _join(config)
        launcher = Launcher(
            listen=listen,
            nats=nats,
            nats_url=url,
            nats_token=token,
            prefix=config.nats.prefix,
            gateway_grace_s=config.gateway.drain_s + GRACE_S,
            commands=commands(options, config, listen, url, token),
            console=console,
            files=described_in(options, data),
            prepare=lambda: provision(url, token, config.nats.prefix, patience_s=_PROVISION_S),
            ready=ready,
        )
        await launcher.run()
    finally:
        if nats is not None:
            nats.close()


async def _start(nats: PrivateNats) -> tuple[str, str | None]:
    await nats.start()
    return nats.server.url, nats.server.token


async def _join(config: DeploymentConfig) -> tuple[str, str | None]:
    url, token = configuration.nats_url(config), nats_token(config.nats)
    await provision(url, token, config.nats.prefix)  # first: a server that will not do is one line
    await _stand_alone(url, token, config.nats.prefix)
    return url, token


async def _stand_alone(url: str, token: str | None, prefix: str) -> None:
    from shared.log import jetstream
    from shared.subjects import Subjects

    subjects = Subjects(prefix)
    log = await jetstream.connect(url, token=token, subjects=subjects, name="dalsegno")
    try:
        await neighbour.refuse_one(log, subjects, url)
    finally:
        await log.close()


def data_dir_of(config: DeploymentConfig) -> DataDir:
    """Where the deployment keeps what it has."""
    return datadir.of(config.name, Path(config.data_dir) if config.data_dir is not None else None)


def described_in(options: ServeOptions, data: DataDir) -> list[Path]:
    """The files that describe the deployment while it is ready."""
    return [data.deployment_file, *([options.ready_file] if options.ready_file is not None else [])]


def commands(
    options: ServeOptions, config: DeploymentConfig, listen: Listen, nats_url: str, nats_token: str | None
) -> list[Command]:
    """How each role is started, in the order of starting.

    Roles read file and environment as we do, and are told what we were told: by argument, as no flag takes a
    secret. What the launcher found itself (a free port, its own server) stands behind that, and wins.
    """
    # -P: a folder named `shared` or `torch.py` where the user happens to be is not ours.
    python = (sys.executable, "-P", "-m", "dalsegno")
    told = [part for one in options.told for part in ("--set", f"{one.key}={one.text}")]
    log = ("--nats", nats_url, "--prefix", config.nats.prefix)
    common = ("--config", options.model, *told, *log, "--parent", str(os.getpid()))
    env = environment.for_child(nats_token=nats_token)
    own: dict[str, tuple[str, ...]] = {
        **{f"worker-{rank}": ("worker", "--rank", str(rank)) for rank in config.ranks},
        "gateway": ("gateway", "--host", listen.host, "--port", str(listen.port)),
        "conductor": ("conductor",),
    }
    return [Command(name=name, argv=(*python, *args, *common), env=env) for name, args in own.items()]


async def provision(url: str, token: str | None, prefix: str, *, patience_s: float = 0.0) -> None:
    """Make the streams where they are not there yet; try for `patience_s` seconds.

    Raises:
        LogUnavailableError: the server cannot be reached, has no JetStream, or refuses.
    """
    from shared.log import jetstream
    from shared.subjects import Subjects

    await jetstream.provision(url, token, Subjects(prefix), timeout_s=patience_s)


@dataclass(slots=True, kw_only=True)
class Launcher:
    """Starts, watches and stops the processes of one deployment.

    Attributes:
        gateway_grace_s: how long the gateway may take to stop: longer than its running streams may go on.
        nats: the private server, already started; None where the deployment joined another.
        commands: `gateway`, `conductor` and `worker-<rank>`, in the order of starting.
        files: where the deployment is described while it is ready.
        prepare: what must be done once while the roles start.
        ready: called once, when all is.
    """

    listen: Listen
    nats: Child | None
    nats_url: str
    nats_token: str | None
    prefix: str
    gateway_grace_s: float
    commands: Sequence[Command]
    console: Console
    files: Sequence[Path]
    prepare: Callable[[], Awaitable[None]]
    ready: Callable[[], None]
    echo: Echo = field(default_factory=Echo)
    _supervisors: dict[str, Supervisor] = field(default_factory=dict)
    _told: asyncio.Event = field(default_factory=asyncio.Event)
    _failure: DalSegnoError | None = None
    _is_ready: bool = False

    async def run(self) -> None:
        """Run until told to stop by a signal.

        Raises:
            DalSegnoError: a role refused its configuration, or the log cannot be prepared.
        """
        children: list[Child] = [RoleProcess(command, self.console) for command in self.commands]
        for child in [self.nats, *children] if self.nats is not None else children:
            self._supervisors[child.name] = Supervisor(child, self.console, self._describe)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # nohup: it shall outlive its terminal
            loop.add_signal_handler(number, self._tell, number)
        try:
            async with asyncio.TaskGroup() as group:
                for supervisor in self._supervisors.values():
                    group.create_task(self._or_stop(supervisor.run()))
                preparing = group.create_task(self._or_stop(self.prepare()))
                waiting = group.create_task(self._or_stop(self._wait_until_ready()))
                await self._told.wait()
                preparing.cancel()
                waiting.cancel()
                await self._drain()
        finally:
            for file in self.files:
                _forget(file)
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Begin to drain."""
        self._told.set()

    def _tell(self, number: signal.Signals) -> None:
        if self.echo.heard():
            return
        if not self._told.is_set():
            self.console.say(f"stopping ({number.name}): running streams finish first; once more to kill")
            self.stop()
            return
        self.console.say("killing everything", "warning")
        for supervisor in self._supervisors.values():
            supervisor.kill()

    async def _or_stop(self, work: Awaitable[None]) -> None:
        """Do `work`; what goes wrong with it for good stops the deployment."""
        try:
            await work
        except DalSegnoError as error:
            self._failure = self._failure or error
            self.stop()

    async def _drain(self) -> None:
        self._is_ready = False
        workers = [name for name in self._supervisors if name.startswith("worker-")]
        for names in (["gateway"], ["conductor"], workers, ["nats"]):
            async with asyncio.TaskGroup() as group:
                for name in names:
                    if (supervisor := self._supervisors.get(name)) is not None:
                        grace_s = self.gateway_grace_s if name == "gateway" else GRACE_S
                        group.create_task(supervisor.stop(grace_s))

    async def _wait_until_ready(self) -> None:
        clock = asyncio.get_running_loop().time
        said, next_word = "", clock() + _SAY_EVERY_S
        while (seen := await health.look(self.listen.reached_at, self.listen.port)) is None or not seen.ready:
            missing = "; ".join(seen.missing) if seen is not None else "the gateway does not answer"
            if clock() >= next_word and missing != said:
                self.console.say(f"not ready yet: {missing}")
                said, next_word = missing, clock() + _SAY_EVERY_S
            await asyncio.sleep(_LOOK_EVERY_S)
        self._is_ready = True
        self._describe()
        self.ready()

    def _describe(self) -> None:
        """Write down how to reach the deployment and which processes it has; again after each restart."""
        if not self._is_ready:
            return
        pids = {name: pid for name, s in self._supervisors.items() if (pid := s.child.pid) is not None}
        deployment = Deployment(
            url=self.listen.url,
            nats_url=self.nats_url,
            nats_token=self.nats_token,
            prefix=self.prefix,
            pids=Pids(
                nats=pids.get("nats"),
                gateway=[pid for name, pid in pids.items() if name == "gateway"],
                conductor=[pid for name, pid in pids.items() if name == "conductor"],
                worker={n.removeprefix("worker-"): p for n, p in pids.items() if n.startswith("worker-")},
            ),
        )
        for file in self.files:
            datadir.write_private(file, deployment)


def _forget(file: Path) -> None:
    """Remove what an earlier run left; a file that is there says that all is ready."""
    if not file.parent.is_dir():
        raise ClientError(f"cannot write {file}: {file.parent} is no folder", code="ready_file")
    try:
        file.unlink(missing_ok=True)
    except OSError as error:
        raise ClientError(f"cannot write {file}: {error.strerror}", code="ready_file") from error
