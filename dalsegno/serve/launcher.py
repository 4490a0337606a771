"""The launcher: starts, supervises and stops the processes of one deployment.

    launcher ─┬─ nats-server      private: loopback, credentials per role, its log under the data dir
              ├─ worker-<rank>    one per rank; first, because it loads the most
              ├─ conductor        or several: conductor-2, ...; one leads
              └─ gateway          HTTP on --host and --port

All processes start at once; each waits for what it needs. One that dies is restarted with back-off; one that
refuses its configuration stops the deployment with its message and status. SIGTERM or Ctrl-C drains from the
bottom of the picture to the top: the gateway finishes its streams while the others still work, and the log
stops last. A second signal kills.

The launcher knows processes and addresses. It reads no events and decides nothing about requests.
"""

import asyncio
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from dalsegno.config.address import Listen
from dalsegno.roles.signal_echo import SignalEcho
from dalsegno.serve import readiness
from dalsegno.serve.data_dir import Pids, ReadyFile, RunningDeployment
from dalsegno.serve.lost_worker_reaper import Kill, LostWorker, WorkerProcess, WorkerProcesses
from dalsegno.serve.role_commands import role_of
from dalsegno.serve.role_runs import Command
from dalsegno.serve.supervisor import Child, RoleProcess, Supervisor
from dalsegno.templates.template import Template
from dalsegno.terminal.console import Console
from shared.errors import DalSegnoError
from shared.log.nats.credentials import Credentials

GRACE_S: Final = 10.0
"""Seconds that a process may take to stop; for a gateway, in addition to the time of its running streams."""
_LOOK_EVERY_S: Final = 0.05
_SAY_EVERY_S: Final = 2.0
"""Seconds between reports of what a start still waits for: a big checkpoint loads for minutes."""


@dataclass(slots=True, kw_only=True)
class Launcher:
    """Starts, watches and stops the processes of one deployment.

    Attributes:
        client: NATS credentials for services that submit requests.
        reader: NATS credentials for services that only read the log.
        gateway_grace_s: the gateway's time to stop: longer than its running streams may take.
        nats: the private server, already started; None if the deployment joined another.
        listens: the address of each gateway.
        commands: `worker-<rank>`, `gateway`, `gateway-2`, ..., `conductor`, `conductor-2`, ..., in starting
        order.
        ready_files: the files that describe the deployment while it is ready.
        keep: creates the log's stream while the roles start, and maintains it.
        reap: ends lost workers; called with the running workers and a function that kills one.
        ready: called once the deployment is ready.
        templates: by role, the process that forks the role's processes; a role without one is executed.
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
    templates: Mapping[str, Template] = field(default_factory=dict)
    echo: SignalEcho = field(default_factory=SignalEcho)
    _supervisors: dict[str, Supervisor] = field(default_factory=dict)
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)
    _failure: DalSegnoError | None = None
    _is_ready: bool = False

    async def run(self) -> None:
        """Run until a signal or `stop`.

        Raises:
            DalSegnoError: a role refused its configuration, or the log cannot be prepared.
        """
        children: list[Child] = [
            RoleProcess(command, self.console, self.templates.get(role_of(command.name)))
            for command in self.commands
        ]
        for child in [self.nats, *children] if self.nats is not None else children:
            self._supervisors[child.name] = Supervisor(child, self.console, self._describe)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # nohup: the deployment outlives its terminal
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            async with asyncio.TaskGroup() as group:
                for supervisor in self._supervisors.values():
                    group.create_task(self._or_stop(supervisor.run()))
                keeping = group.create_task(self._or_stop(self.keep()))
                waiting = group.create_task(self._or_stop(self._wait_until_ready()))
                reaping = group.create_task(self._or_stop(self.reap(self._workers, self._end)))
                await self._stopping.wait()
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
        self._stopping.set()

    def _on_signal(self, number: signal.Signals) -> None:
        if self.echo.is_echo():
            return
        if not self._stopping.is_set():
            self.console.say(f"stopping ({number.name}): running streams finish first; a second signal kills")
            self.stop()
            return
        self.console.say("killing everything", "warning")
        for supervisor in self._supervisors.values():
            supervisor.kill()

    async def _or_stop(self, work: Awaitable[None]) -> None:
        """Run `work`; a permanent error stops the deployment."""
        try:
            await work
        except DalSegnoError as error:
            self._failure = self._failure or error
            self.stop()

    def _workers(self) -> dict[int, WorkerProcess]:
        """The running workers, by rank."""
        found = {}
        for name, supervisor in self._supervisors.items():
            role, _, rank = name.partition("-")
            if role == "worker" and (pid := supervisor.child.pid) is not None:
                found[int(rank)] = WorkerProcess(pid, supervisor.since_ns)
        return found

    def _end(self, lost: LostWorker) -> None:
        """Kill a worker; its supervisor restarts it."""
        name = f"worker-{lost.rank}"
        self.console.say(f"{name} is killed: {lost.why}", "warning")
        self._supervisors[name].child.kill(lost.why)

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
        reported, next_report = "", clock() + _SAY_EVERY_S
        while missing := await self._missing():
            if clock() >= next_report and missing != reported:
                self.console.say(f"not ready yet: {missing}")
                reported, next_report = missing, clock() + _SAY_EVERY_S
            await asyncio.sleep(_LOOK_EVERY_S)
        self._is_ready = True
        self._describe()
        self.ready()

    async def _missing(self) -> str:
        """The reason that a gateway is not ready; empty when all are ready."""
        for listen in self.listens:
            seen = await readiness.look(listen.reached_at, listen.port)
            if seen is None:
                return f"the gateway at {listen.url} does not answer"
            if not seen.ready:
                return "; ".join(seen.missing) or "the gateway is not ready"
        return ""

    def _describe(self) -> None:
        """Write the ready files; called again after each restart, because process ids change."""
        if not self._is_ready:
            return
        pids = {name: pid for name, s in self._supervisors.items() if (pid := s.child.pid) is not None}
        deployment = RunningDeployment(
            url=self.listens[0].url,
            urls=[listen.url for listen in self.listens],
            nats_url=self.nats_url,
            nats_token=self.client.token,
            nats_client=self.client.as_dict(),
            nats_reader=self.reader.as_dict(),
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
