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
import signal
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from dalsegno.config.address import Listen
from dalsegno.roles.signal_echo import SignalEcho
from dalsegno.serve import readiness
from dalsegno.serve.data_dir import Pids, ReadyFile, RunningDeployment
from dalsegno.serve.lost_worker_reaper import Kill, LostWorker, WorkerProcess, WorkerProcesses
from dalsegno.serve.role_commands import role_of
from dalsegno.serve.supervisor import Child, Command, RoleProcess, Supervisor
from dalsegno.terminal.console import Console
from shared.errors import DalSegnoError
from shared.log.nats.credentials import Credentials

GRACE_S: Final = 10.0
"""How long a process may take to stop; a gateway, once its running streams have had their time."""
_LOOK_EVERY_S: Final = 0.05
_SAY_EVERY_S: Final = 2.0
"""How often it is said what a start still waits for: a big checkpoint loads for minutes."""


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
    reap: Callable[[WorkerProcesses, Kill], Awaitable[None]]
    ready: Callable[[], None]
    echo: SignalEcho = field(default_factory=SignalEcho)
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

    def _workers(self) -> dict[int, WorkerProcess]:
        """The workers that run now."""
        found = {}
        for name, supervisor in self._supervisors.items():
            role, _, rank = name.partition("-")
            if role == "worker" and (pid := supervisor.child.pid) is not None:
                found[int(rank)] = WorkerProcess(pid, supervisor.since_ns)
        return found

    def _end(self, condemned: LostWorker) -> None:
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
                    if role_of(name) == role:
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
        deployment = RunningDeployment(
            url=self.listens[0].url,
            urls=[listen.url for listen in self.listens],
            nats_url=self.nats_url,
            nats_token=self.client.token,
            nats_client=self.client.told,
            nats_reader=self.reader.told,
            prefix=self.prefix,
            pids=Pids(
                nats=pids.get("nats"),
                gateway=[pid for name, pid in pids.items() if role_of(name) == "gateway"],
                conductor=[pid for name, pid in pids.items() if role_of(name) == "conductor"],
                worker={n.removeprefix("worker-"): p for n, p in pids.items() if n.startswith("worker-")},
            ),
        )
        for file in self.ready_files:
            file.write(deployment)
