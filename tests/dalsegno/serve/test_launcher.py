import asyncio
import itertools
import json
import os
import signal
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from configs.deployment import DeploymentConfig, NatsSettings, NodeGroup, RecoverySettings
from dalsegno.config import address, environment, resolve
from dalsegno.config.address import Listen
from dalsegno.roles import signal_echo
from dalsegno.serve import data_dir, role_commands
from dalsegno.serve.launcher import Launcher
from dalsegno.serve.lost_worker_reaper import Kill, LostWorker, WorkerProcesses
from dalsegno.serve.options import ServeOptions
from dalsegno.serve.private_credentials import private_roles
from dalsegno.serve.private_nats import PrivateNats
from dalsegno.serve.role_runs import Command
from dalsegno.serve.supervisor import Child, RefusedError
from shared.log.nats.credentials import Credentials
from shared.log.nats.private_server import NatsServer
from shared.log.port import LogUnavailableError
from tests.dalsegno.fakes import DEAF, HEALTHY_GATEWAY, OBEDIENT, REFUSING, Heard, command, gone, runs


@dataclass(slots=True)
class Running:
    """A launcher over fake roles, ready."""

    heard: Heard
    listens: list[Listen]
    ready_file: Path

    def described(self) -> dict[str, Any]:
        found = json.loads(self.ready_file.read_text())
        assert isinstance(found, dict)
        return found

    @property
    def pids(self) -> dict[str, Any]:
        found = self.described()["pids"]
        assert isinstance(found, dict)
        return found

    def all_pids(self) -> list[int]:
        pids = self.pids
        own = [*pids["gateway"], *pids["conductor"], *pids["worker"].values()]
        return [*own, pids["nats"]] if pids["nats"] is not None else own


Serving = Callable[..., AbstractAsyncContextManager[Running]]


async def nothing() -> None:
    pass


async def nobody(processes: WorkerProcesses, kill: Kill) -> None:
    """No worker is lost."""


def tell(number: signal.Signals = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


@pytest.fixture
def serving(tmp_path: Path) -> Serving:
    """Run a launcher until the block ends, and stop it then."""

    @asynccontextmanager
    async def serve(
        conductor: str = OBEDIENT,
        worker: str = OBEDIENT,
        stand_bys: Sequence[str] = (),
        gateways: int = 1,
        nats: Child | None = None,
        keep: Callable[[], Awaitable[None]] = nothing,
        reap: Callable[[WorkerProcesses, Kill], Awaitable[None]] = nobody,
    ) -> AsyncIterator[Running]:
        listens = address.free("127.0.0.1", 0, gateways)
        heard = Heard(tmp_path)
        running = Running(heard, listens, tmp_path / "ready.json")
        ready = asyncio.Event()
        it = Launcher(
            listens=listens,
            nats=nats,
            nats_url="nats://127.0.0.1:4222",
            client=Credentials(user="client", password="sesame"),
            reader=Credentials(user="reader", password="simsim"),
            prefix="ds",
            gateway_grace_s=60.0,
            commands=[
                command("worker-0", worker),
                *(
                    command(
                        f"gateway-{number}" if number > 1 else "gateway", HEALTHY_GATEWAY, str(listen.port)
                    )
                    for number, listen in enumerate(listens, 1)
                ),
                command("conductor", conductor),
                *(command(name, OBEDIENT) for name in stand_bys),
            ],
            console=heard,
            ready_files=[data_dir.ReadyFile(running.ready_file)],
            keep=keep,
            reap=reap,
            ready=ready.set,
        )
        async with asyncio.TaskGroup() as group:
            task = group.create_task(it.run())
            try:
                await ready.wait()
                for _ in ("conductor", "worker-0", *stand_bys):
                    await heard.until("up")
                yield running
            finally:
                if not task.done():
                    it.stop()

    return serve


@pytest.mark.processes
async def test_once_all_is_ready_the_ready_file_says_how_to_reach_it(serving: Serving) -> None:
    async with serving() as running:
        found = running.described()
        pids = found.pop("pids")
        assert found == {
            "url": running.listens[0].url,
            "urls": [running.listens[0].url],
            "nats_url": "nats://127.0.0.1:4222",
            "nats_token": None,
            "nats_client": {"user": "client", "password": "sesame"},
            "nats_reader": {"user": "reader", "password": "simsim"},
            "prefix": "ds",
        }
        assert pids["nats"] is None
        assert all(runs(pid) for pid in running.all_pids())
        assert (len(pids["gateway"]), len(pids["conductor"]), list(pids["worker"])) == (1, 1, ["0"])
        assert stat.S_IMODE(running.ready_file.stat().st_mode) == 0o600
        assert data_dir.is_held(running.ready_file)
    assert not running.ready_file.exists()  # it would be a lie from here on


@pytest.mark.processes
async def test_the_ready_file_follows_a_restart(serving: Serving) -> None:
    async with serving() as running:
        first = running.pids["worker"]["0"]
        os.kill(first, signal.SIGKILL)
        await running.heard.until("worker-0 was killed by SIGKILL; it is restarted in 0.2 s")
        await running.heard.until("up")
        second = running.pids["worker"]["0"]
        assert second != first
        assert runs(second)


@pytest.mark.processes
async def test_a_signal_drains_the_gateway_first_and_the_workers_last(serving: Serving) -> None:
    async with serving() as running:
        pids = running.all_pids()
        tell()
        assert "stopping (SIGTERM)" in (await running.heard.until("stopping"))[1]
        assert (await running.heard.until("told to stop"))[0] == "conductor"
        assert not runs(pids[0])  # the gateway
        assert (await running.heard.until("told to stop"))[0] == "worker-0"
        assert not runs(pids[1])  # the conductor
        await gone(*pids)


@pytest.mark.processes
async def test_of_several_conductors_all_are_described_and_all_are_stopped_before_the_workers(
    serving: Serving,
) -> None:
    async with serving(stand_bys=["conductor-2"]) as running:
        pids = running.all_pids()
        assert len(running.described()["pids"]["conductor"]) == 2
        tell()
        told = [(await running.heard.until("told to stop"))[0] for _ in range(3)]
        assert (sorted(told[:2]), told[2]) == (["conductor", "conductor-2"], "worker-0")
        await gone(*pids)


@pytest.mark.processes
async def test_of_several_gateways_all_are_described_once_all_are_ready_and_stopped_first(
    serving: Serving,
) -> None:
    async with serving(gateways=2) as running:
        found = running.described()
        pids = running.all_pids()
        assert found["urls"] == [listen.url for listen in running.listens]
        assert (found["url"], len(found["pids"]["gateway"])) == (found["urls"][0], 2)
        tell()
        assert (await running.heard.until("told to stop"))[0] == "conductor"
        assert not any(runs(pid) for pid in found["pids"]["gateway"])
        await gone(*pids)


@pytest.mark.processes
async def test_a_second_signal_kills_what_does_not_hear(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signal_echo, "ECHO_S", 0.0)
    async with serving(conductor=DEAF, worker=DEAF) as running:
        pids = running.all_pids()
        tell(signal.SIGINT)
        await running.heard.until("stopping (SIGINT)")
        tell(signal.SIGINT)
        await running.heard.until("killing everything")
        await gone(*pids)


@pytest.mark.processes
async def test_the_echo_of_a_signal_kills_nothing(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal_echo, "ECHO_S", 1e9)
    async with serving() as running:
        tell()
        await running.heard.until("stopping (SIGTERM)")
        tell()
        assert (await running.heard.until("told to stop"))[0] == "conductor"
        assert (await running.heard.until("told to stop"))[0] == "worker-0"


@pytest.mark.processes
async def test_a_role_that_refuses_its_configuration_stops_all_with_its_own_line(serving: Serving) -> None:
    refused = pytest.RaisesGroup(pytest.RaisesExc(RefusedError, match=r"^worker-0: model 'x' is unknown$"))
    with refused:
        async with serving(worker=REFUSING) as running:
            await running.heard.until("never said")


@pytest.mark.processes
async def test_a_log_that_cannot_be_prepared_stops_all(serving: Serving) -> None:
    async def fail() -> None:
        raise LogUnavailableError("nats://127.0.0.1:4222 has no JetStream")

    with pytest.RaisesGroup(pytest.RaisesExc(LogUnavailableError, match="has no JetStream")):
        async with serving(keep=fail) as running:
            await running.heard.until("never said")


@pytest.mark.processes
async def test_a_nats_server_that_is_killed_comes_back_at_its_address(
    serving: Serving, tmp_path: Path
) -> None:
    nats = PrivateNats(NatsServer(tmp_path / "nats"))
    try:
        await nats.start()
        url = nats.server.url
        async with serving(nats=nats) as running:
            first = running.pids["nats"]
            os.kill(first, signal.SIGKILL)
            await running.heard.until("nats was killed by SIGKILL; it is restarted in 0.2 s")
            async with asyncio.timeout(60):
                while running.pids["nats"] in {first, None}:  # noqa: ASYNC110 - a file sets no event
                    await asyncio.sleep(0.005)
            assert nats.server.url == url
            pids = running.all_pids()
        await gone(*pids)
    finally:
        nats.close()


ROLES: Final = private_roles([0, 1])


def commands(
    *flags: str, conductors: int = 1, gateways: int = 1, is_private: bool = True
) -> dict[str, Command]:
    config = DeploymentConfig(
        model="decoder_lm",
        checkpoint="/checkpoint",
        max_seq_len=64,
        node_groups=[NodeGroup(node_names=["prepare"], ranks=[0]), NodeGroup(node_names=["llm"], ranks=[1])],
        data_dir="/kept here",
        recovery=RecoverySettings(conductors=conductors),
        nats=NatsSettings(ca_file="/authority"),
    )
    options = ServeOptions(model="demo", settings=resolve.settings_of(set_=flags), ready_file=None)
    listens = [Listen(host="127.0.0.1", port=8000 + number) for number in range(gateways)]
    roles = ROLES if is_private else None
    found = role_commands.commands(options, config, listens, "nats://127.0.0.1:4222", roles)
    return {one.name: one for one in found}


def test_there_is_one_worker_per_rank_and_they_start_first() -> None:
    assert list(commands()) == ["worker-0", "worker-1", "gateway", "conductor"]


def test_of_several_conductors_each_has_a_name_and_listens_for_the_others() -> None:
    several = commands(conductors=3)
    assert [name for name in several if name not in commands()] == ["conductor-2", "conductor-3"]
    assert "--alone" in commands()["conductor"].args
    assert not any("--alone" in one.args for one in several.values())


def test_of_several_gateways_each_has_a_name_a_port_and_the_same_key() -> None:
    several = commands(gateways=3)
    assert [name for name in several if name not in commands()] == ["gateway-2", "gateway-3"]
    for name, port in (("gateway", "8000"), ("gateway-2", "8001"), ("gateway-3", "8002")):
        assert ("--port", port) in itertools.pairwise(several[name].args)
        assert several[name].env[environment.NATS_SEED] == ROLES["gateway"].seed


def test_conductors_are_told_where_the_deployment_keeps_what_it_has() -> None:
    for name in ("conductor", "conductor-2"):
        assert ("--data-dir", "/kept here") in itertools.pairwise(commands(conductors=2)[name].args)


def test_each_role_is_given_its_own_key_and_no_other_and_none_by_argument() -> None:
    roles = {"conductor-2": "conductor"}
    secrets = {role: shown.seed or shown.password or "" for role, shown in ROLES.items()}

    for name, one in commands(conductors=2).items():
        role = roles.get(name, name)
        assert one.env[environment.NATS_SEED] == secrets[role]
        for other, secret in secrets.items():
            assert secret not in " ".join(one.args)
            assert (secret in one.env.values()) == (other == role)


def test_a_private_server_is_spoken_to_without_tls_and_anothers_as_we_are_told() -> None:
    for one in commands().values():
        assert ("--set", "nats.ca_file=") in itertools.pairwise(one.args)
    for one in commands(is_private=False).values():
        assert "nats.ca_file=" not in one.args
        assert environment.NATS_SEED not in one.env


def test_what_the_flags_say_is_handed_on_to_every_role_and_understood_the_same() -> None:
    flags = ("gateway.cors_origins=a, *", "model_kwargs.device=cuda:0", "kv_tokens=", "name=a = b")
    told = resolve.settings_of(set_=flags)

    for one in commands(*flags).values():
        handed = [text for flag, text in itertools.pairwise(one.args) if flag == "--set"]
        assert resolve.settings_of(set_=handed[: len(flags)]) == told


@pytest.mark.processes
async def test_a_worker_that_is_given_up_is_killed_and_starts_again(serving: Serving) -> None:
    may_kill, seen = asyncio.Event(), list[dict[int, int]]()

    async def reap(processes: WorkerProcesses, kill: Kill) -> None:
        await may_kill.wait()
        seen.append({rank: process.pid for rank, process in processes().items()})
        kill(LostWorker(0, processes()[0].pid, "it was given up (unheard)"))

    async with serving(reap=reap) as running:
        first = running.pids["worker"]["0"]
        may_kill.set()
        assert (await running.heard.until("is killed"))[1] == "worker-0 is killed: it was given up (unheard)"
        await running.heard.until("was killed by SIGKILL; it is restarted")
        await running.heard.until("up")
        assert seen == [{0: first}]
        assert running.pids["worker"]["0"] != first
