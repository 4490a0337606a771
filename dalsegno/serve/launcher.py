"""The embedded deployment: `dalsegno serve MODEL` runs everything on one machine.

    launcher ─┬─ nats-server      private: loopback, each role its own secrets, its log under the data dir
              ├─ worker-<rank>    one per rank; first, because it has the most to load
              ├─ conductor        or several: conductor-2, ...; one leads
              └─ gateway          HTTP on --host and --port

All are processes of their own, started at once; each waits for what it needs. One that dies starts
again, with back-off; one that refuses its configuration stops the deployment with its message
and status. SIGTERM or Ctrl-C drains from the bottom of the picture to the top: the gateway finishes its
streams while all others still work, and the log goes last. A second one kills.

The launcher knows processes and addresses. It knows no events, and decides nothing about requests.
"""

import asyncio
import contextlib
import logging
import os
import platform
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from configs.deployment import DeploymentConfig, log_keeping, nats_credentials
from dalsegno.config import address, environment, resolve
from dalsegno.config.address import Listen
from dalsegno.config.layers import Setting
from dalsegno.serve import data_dir, prefix_guard, readiness, reaper
from dalsegno.serve.data_dir import DataDir, Deployment, Pids, ReadyFile
from dalsegno.serve.private_credentials import private_roles
from dalsegno.serve.private_nats import PrivateNats
from dalsegno.serve.profile import profiled
from dalsegno.serve.reaper import Condemned, Kill, Process, Processes
from dalsegno.serve.signals import Echo
from dalsegno.serve.supervisor import Child, Command, RefusedError, RoleProcess, Supervisor
from dalsegno.serve.welcome import welcome
from dalsegno.terminal.console import Console, Warnings
from models import registry
from shared.errors import ClientError, DalSegnoError
from shared.log.nats.credentials import Credentials
from shared.log.nats.durability import Keeping
from shared.log.nats.permissions import CLIENT, PROVISIONER, READER, authorization
from shared.log.nats.private_server import NatsServer
from shared.log.port import Log

GRACE_S: Final = 10.0
"""How long a process may take to stop; a gateway, once its running streams have had their time."""
_PROVISION_S: Final = 30.0
"""For how long the private server may be away (it is being restarted) while the streams are made."""
_TLS: Final = ("ca_file", "cert_file", "key_file")
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
        profile: receives the timeline of all processes when they have ended (`dalsegno.serve.profile`).
    """

    model: str
    told: Sequence[Setting]
    ready_file: Path | None
    profile: Path | None = None


def serve(options: ServeOptions) -> None:
    """Run a deployment until told to stop.

    Raises:
        RefusedError: a role refused its configuration, or would.
        DalSegnoError: it cannot run; nothing is left running.
    """
    began_s = time.monotonic()
    found = resolve.effective(options.model, options.told)
    try:
        resolve.check(found)
    except ClientError as error:  # a role would refuse it, minutes later
        raise RefusedError(error.message) from error
    config = found.config
    data = data_dir_of(config)
    # Locked first: who starts the same thing twice is told so, and the files are left to whom they belong.
    with data.lock() as hold:
        listens = address.free(config.gateway.host, config.gateway.port, config.recovery.gateways)
        ready_files = ready_files_of(options, data)
        for file in ready_files:
            file.clear()
        data.remember(config)
        colours = sys.stderr.isatty() and environment.read().colours
        console = Console(
            data.logs, colours=colours, is_json=config.logs.format == "json", level=config.logs.level
        )

        def ready() -> None:
            hold.is_used = True
            graph, took_s = registry.graph(config.model), time.monotonic() - began_s
            console.show(
                welcome(
                    config.name,
                    listens,
                    data.path,
                    took_s,
                    outputs=graph.outputs,
                    voices=graph.voices,
                    durability=config.nats.durability,
                )
            )

        with (
            contextlib.closing(console),
            _heard(Warnings(console)),
            profiled(options.profile) as parts,
        ):
            asyncio.run(_serve(options, config, listens, data, console, ready, parts, ready_files))


@contextlib.contextmanager
def _heard(handler: logging.Handler) -> Iterator[None]:
    """Have what is logged in this process said in its own way."""
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)


async def _serve(
    options: ServeOptions,
    config: DeploymentConfig,
    listens: Sequence[Listen],
    data: DataDir,
    console: Console,
    ready: Callable[[], None],
    parts: Path | None,
    ready_files: Sequence[ReadyFile],
) -> None:
    is_synced = config.nats.durability == "host"
    roles = private_roles(config.ranks) if config.nats.url is None else _told(config)
    nats = _private(data, config, roles, syncs_always=is_synced) if config.nats.url is None else None
    keeping = log_keeping(config.nats, syncs_always=is_synced and nats is not None)
    try:
        url = await _start(nats) if nats is not None else await _join(config, roles)
        launcher = Launcher(
            listens=listens,
            nats=nats,
            nats_url=url,
            client=roles[CLIENT],
            reader=roles[READER],
            prefix=config.nats.prefix,
            gateway_grace_s=config.gateway.drain_s + GRACE_S,
            commands=commands(options, config, listens, url, roles if nats is not None else None, parts),
            console=console,
            ready_files=ready_files,
            keep=partial(_keep, url, roles[PROVISIONER], config.nats.prefix, keeping, console, nats),
            reap=partial(_reap, url, roles[READER], config.nats.prefix),
            ready=ready,
        )
        await launcher.run()
    finally:
        if nats is not None:
            nats.close()


def _told(config: DeploymentConfig) -> dict[str, Credentials]:
    """What we show to another's server, and what others may."""
    return {role: nats_credentials(config.nats, role) for role in (PROVISIONER, READER, CLIENT)}


def _private(
    data: DataDir, config: DeploymentConfig, roles: Mapping[str, Credentials], *, syncs_always: bool
) -> PrivateNats:
    from shared.subjects import Subjects

    may_come = authorization(roles, Subjects(config.nats.prefix))
    return PrivateNats(NatsServer(data.nats, authorization=may_come, syncs_always=syncs_always))


async def _start(nats: PrivateNats) -> str:
    await nats.start()
    return nats.server.url


async def _join(config: DeploymentConfig, roles: Mapping[str, Credentials]) -> str:
    url = resolve.nats_url(config)
    # First: a server that will not do is one line.
    await provision(url, roles[PROVISIONER], config.nats.prefix, log_keeping(config.nats))
    await _stand_alone(url, roles[READER], config.nats.prefix)
    return url


async def _stand_alone(url: str, credentials: Credentials, prefix: str) -> None:
    from shared.log.nats import jetstream
    from shared.subjects import Subjects

    subjects = Subjects(prefix)
    log = await jetstream.connect(url, credentials=credentials, subjects=subjects, name="dalsegno")
    try:
        await prefix_guard.refuse_one(log, subjects, url)
    finally:
        await log.close()


async def _keep(
    url: str,
    credentials: Credentials,
    prefix: str,
    keeping: Keeping,
    console: Console,
    nats: PrivateNats | None,
) -> None:
    """Make the stream, and look after it."""
    from dalsegno.serve.retention_guard import Keeper
    from shared.log.nats.provisioning import Provisioner
    from shared.subjects import Subjects

    async def look_now() -> None:
        await keeper.wake()

    provisioner = Provisioner(url, Subjects(prefix), look_now)
    if nats is None:
        keeper = Keeper(provisioner, keeping, console.say)
    else:
        keeper = Keeper(
            provisioner,
            keeping,
            console.say,
            folder=nats.server.log_file.parent,
            failed_write=lambda: nats.server.failed_write,
            restart=nats.kill,
        )
    await provisioner.open(credentials, timeout_s=_PROVISION_S)
    try:
        await keeper.prepare(_PROVISION_S)
        await keeper.run()
    finally:
        await provisioner.close()


async def _reap(url: str, credentials: Credentials, prefix: str, processes: Processes, kill: Kill) -> None:
    """End workers that were given up and do not come back."""
    from shared.log.nats import jetstream
    from shared.subjects import Subjects

    subjects = Subjects(prefix)

    async def connect() -> Log:
        return await jetstream.connect(
            url, credentials=credentials, subjects=subjects, name="dalsegno", timeout_s=_PROVISION_S
        )

    await reaper.reap(connect, subjects, platform.node(), processes, kill)


def data_dir_of(config: DeploymentConfig) -> DataDir:
    """Where the deployment keeps what it has."""
    return data_dir.of(config.name, Path(config.data_dir) if config.data_dir is not None else None)


def ready_files_of(options: ServeOptions, data: DataDir) -> list[ReadyFile]:
    """The files that describe the deployment while it is ready.

    Raises:
        ClientError: such a file cannot be written.
    """
    files = [data.deployment_file, *([options.ready_file] if options.ready_file is not None else [])]
    for file in files:
        if not file.parent.is_dir():
            raise ClientError(f"cannot write {file}: {file.parent} is no folder", code="ready_file")
    return list(map(ReadyFile, files))


def commands(
    options: ServeOptions,
    config: DeploymentConfig,
    listens: Sequence[Listen],
    nats_url: str,
    private: Mapping[str, Credentials] | None,
    parts: Path | None = None,
) -> list[Command]:
    """How each role is started, in the order of starting.

    Roles read file and environment as we do, and are told what we were told: by argument, as no flag takes a
    secret. What the launcher found itself (a free port, its own server) stands behind that, and wins.
    `private` is what each role shows to a server of ours; what to show to another's, they are told as we are.
    `parts` is the folder for what they write of a profile.
    """
    # -P: a folder named `shared` or `torch.py` where the user happens to be is not ours.
    python = (sys.executable, "-P", "-m", "dalsegno")
    told = [part for one in options.told for part in ("--set", f"{one.key}={one.text}")]
    if private is not None:  # it speaks no TLS, whatever is told of another's
        told += [part for key in _TLS if getattr(config.nats, key) for part in ("--set", f"nats.{key}=")]
    log = ("--nats", nats_url, "--prefix", config.nats.prefix)
    profile = ("--profile-parts", str(parts)) if parts is not None else ()
    common = ("--config", options.model, *told, *log, *profile, "--parent", str(os.getpid()))
    conductors = _numbered("conductor", config.recovery.conductors)
    conducting = ("conductor", "--data-dir", str(data_dir_of(config).path))
    own: dict[str, tuple[str, ...]] = {
        **{f"worker-{rank}": ("worker", "--rank", str(rank)) for rank in config.ranks},
        **{
            name: ("gateway", "--host", listen.host, "--port", str(listen.port))
            for name, listen in zip(_numbered("gateway", len(listens)), listens, strict=True)
        },
        **{name: conducting if len(conductors) > 1 else (*conducting, "--alone") for name in conductors},
    }

    def env(name: str) -> dict[str, str]:
        if private is None:
            return environment.for_child(credentials=None)
        shown = private[name if _role(name) == "worker" else _role(name)]
        return environment.for_child(credentials=environment.of(shown))

    return [Command(name=name, argv=(*python, *args, *common), env=env(name)) for name, args in own.items()]


def _numbered(role: str, count: int) -> list[str]:
    """The names of so many processes of one role."""
    return [role, *(f"{role}-{number}" for number in range(2, count + 1))]


def _role(name: str) -> str:
    """The role of a process, by its name."""
    return name.partition("-")[0]


async def provision(
    url: str, credentials: Credentials, prefix: str, keeping: Keeping, *, patience_s: float = 0.0
) -> None:
    """Make the streams where they are not there yet; try for `patience_s` seconds.

    Raises:
        LogUnavailableError: the server cannot be reached, has no JetStream, or refuses.
        DurabilityError: it does not keep the log as it is to be kept.
    """
    from shared.log.nats import jetstream
    from shared.subjects import Subjects

    await jetstream.provision(url, credentials, Subjects(prefix), keeping, timeout_s=patience_s)


@dataclass(slots=True, kw_only=True)
class Launcher:
    """Starts, watches and stops the processes of one deployment.

    Attributes:
        client: what a service shows to NATS that asks there.
        reader: what who only reads the log does.
        gateway_grace_s: how long the gateway may take to stop: longer than its running streams may go on.
        nats: the private server, already started; None where the deployment joined another.
        listens: where each gateway listens.
        commands: `worker-<rank>`, `gateway`, `gateway-2`, ..., `conductor`, `conductor-2`, ..., in the order
            of starting.
        ready_files: where the deployment is described while it is ready.
        keep: makes the log's stream while the roles start, and looks after it.
        reap: ends workers that the deployment has given up; told which there are, and how to end one.
        ready: called once, when all is.
    """

    listens: Sequence[Listen]
    nats: Child | None
    nats_url: str
    client: Credentials
    reader: Credentials
    prefix: str
    gateway_grace_s: float
    commands: Sequence[Command]
    console: Console
    ready_files: Sequence[ReadyFile]
    keep: Callable[[], Awaitable[None]]
    reap: Callable[[Processes, Kill], Awaitable[None]]
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
                keeping = group.create_task(self._or_stop(self.keep()))
                waiting = group.create_task(self._or_stop(self._wait_until_ready()))
                reaping = group.create_task(self._or_stop(self.reap(self._workers, self._end)))
                await self._told.wait()
                reaping.cancel()
                keeping.cancel()
                waiting.cancel()
                await self._drain()
        finally:
            for file in self.ready_files:
                file.withdraw()
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

    def _workers(self) -> dict[int, Process]:
        """The workers that run now."""
        found = {}
        for name, supervisor in self._supervisors.items():
            role, _, rank = name.partition("-")
            if role == "worker" and (pid := supervisor.child.pid) is not None:
                found[int(rank)] = Process(pid, supervisor.since_ns)
        return found

    def _end(self, condemned: Condemned) -> None:
        """Kill a worker; its supervisor starts it anew."""
        name = f"worker-{condemned.rank}"
        self.console.say(f"{name} is killed: {condemned.why}", "warning")
        self._supervisors[name].child.kill()

    async def _drain(self) -> None:
        self._is_ready = False
        for role in ("gateway", "conductor", "worker", "nats"):
            grace_s = self.gateway_grace_s if role == "gateway" else GRACE_S
            async with asyncio.TaskGroup() as group:
                for name, supervisor in self._supervisors.items():
                    if _role(name) == role:
                        group.create_task(supervisor.stop(grace_s))

    async def _wait_until_ready(self) -> None:
        clock = asyncio.get_running_loop().time
        said, next_word = "", clock() + _SAY_EVERY_S
        while missing := await self._missing():
            if clock() >= next_word and missing != said:
                self.console.say(f"not ready yet: {missing}")
                said, next_word = missing, clock() + _SAY_EVERY_S
            await asyncio.sleep(_LOOK_EVERY_S)
        self._is_ready = True
        self._describe()
        self.ready()

    async def _missing(self) -> str:
        """What the first gateway that is not ready waits for; empty when all are."""
        for listen in self.listens:
            seen = await readiness.look(listen.reached_at, listen.port)
            if seen is None:
                return f"the gateway at {listen.url} does not answer"
            if not seen.ready:
                return "; ".join(seen.missing) or "the gateway is not ready"
        return ""

    def _describe(self) -> None:
        """Write down how to reach the deployment and which processes it has; again after each restart."""
        if not self._is_ready:
            return
        pids = {name: pid for name, s in self._supervisors.items() if (pid := s.child.pid) is not None}
        deployment = Deployment(
            url=self.listens[0].url,
            urls=[listen.url for listen in self.listens],
            nats_url=self.nats_url,
            nats_token=self.client.token,
            nats_client=self.client.told,
            nats_reader=self.reader.told,
            prefix=self.prefix,
            pids=Pids(
                nats=pids.get("nats"),
                gateway=[pid for name, pid in pids.items() if _role(name) == "gateway"],
                conductor=[pid for name, pid in pids.items() if _role(name) == "conductor"],
                worker={n.removeprefix("worker-"): p for n, p in pids.items() if n.startswith("worker-")},
            ),
        )
        for file in self.ready_files:
            file.write(deployment)
