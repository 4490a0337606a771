import asyncio
import itertools
import json
import os
import signal
import stat
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dalsegno import address, configuration, environment, launcher, signals
from dalsegno.address import Listen
from dalsegno.launcher import Launcher, ServeOptions
from dalsegno.private_nats import PrivateNats
from dalsegno.supervisor import Child, Command, RefusedError
from shared.config import DeploymentConfig, NodeGroup
from shared.log.port import LogUnavailableError
from shared.log.server import NatsServer
from tests.dalsegno.fakes import DEAF, HEALTHY_GATEWAY, OBEDIENT, REFUSING, Heard, command, gone, runs


@dataclass(slots=True)
class Running:
    """A launcher over fake roles, ready."""

    heard: Heard
    listen: Listen
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


def tell(number: signal.Signals = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


@pytest.fixture
def serving(tmp_path: Path) -> Serving:
    """Run a launcher until the block ends; it is told to stop then, if it was not before."""

    @asynccontextmanager
    async def serve(
        conductor: str = OBEDIENT,
        worker: str = OBEDIENT,
        nats: Child | None = None,
        prepare: Callable[[], Awaitable[None]] = nothing,
    ) -> AsyncIterator[Running]:
        listen = address.free("127.0.0.1", 0)
        heard = Heard(tmp_path)
        running = Running(heard, listen, tmp_path / "ready.json")
        ready = asyncio.Event()
        it = Launcher(
            listen=listen,
            nats=nats,
            nats_url="nats://127.0.0.1:4222",
            nats_token="sesame",
            prefix="ds",
            gateway_grace_s=60.0,
            commands=[
                command("worker-0", worker),
                command("gateway", HEALTHY_GATEWAY, str(listen.port)),
                command("conductor", conductor),
            ],
            console=heard,
            files=[running.ready_file],
            prepare=prepare,
            ready=ready.set,
        )
        async with asyncio.TaskGroup() as group:
            task = group.create_task(it.run())
            try:
                await ready.wait()
                for _ in ("conductor", "worker-0"):
                    await heard.until("up")
                yield running
            finally:
                if not task.done():
                    it.stop()

    return serve


async def test_once_all_is_ready_the_ready_file_says_how_to_reach_it(serving: Serving) -> None:
    async with serving() as running:
        found = running.described()
        pids = found.pop("pids")
        assert found == {
            "url": running.listen.url,
            "nats_url": "nats://127.0.0.1:4222",
            "nats_token": "sesame",
            "prefix": "ds",
        }
        assert pids["nats"] is None
        assert all(runs(pid) for pid in running.all_pids())
        assert (len(pids["gateway"]), len(pids["conductor"]), list(pids["worker"])) == (1, 1, ["0"])
        assert stat.S_IMODE(running.ready_file.stat().st_mode) == 0o600
    assert not running.ready_file.exists()  # it would be a lie from here on


async def test_the_ready_file_follows_a_restart(serving: Serving) -> None:
    async with serving() as running:
        first = running.pids["worker"]["0"]
        os.kill(first, signal.SIGKILL)
        await running.heard.until("worker-0 was killed by SIGKILL; it starts again in 0.2 s")
        await running.heard.until("up")
        second = running.pids["worker"]["0"]
        assert second != first
        assert runs(second)


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


async def test_a_second_signal_kills_what_does_not_hear(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signals, "ECHO_S", 0.0)
    async with serving(conductor=DEAF, worker=DEAF) as running:
        pids = running.all_pids()
        tell(signal.SIGINT)
        await running.heard.until("stopping (SIGINT)")
        tell(signal.SIGINT)
        await running.heard.until("killing everything")
        await gone(*pids)


async def test_the_echo_of_a_signal_kills_nothing(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "ECHO_S", 1e9)
    async with serving() as running:
        tell()
        await running.heard.until("stopping (SIGTERM)")
        tell()
        assert (await running.heard.until("told to stop"))[0] == "conductor"
        assert (await running.heard.until("told to stop"))[0] == "worker-0"


async def test_a_role_that_refuses_its_configuration_stops_all_with_its_own_line(serving: Serving) -> None:
    refused = pytest.RaisesGroup(pytest.RaisesExc(RefusedError, match=r"^worker-0: model 'x' is unknown$"))
    with refused:
        async with serving(worker=REFUSING) as running:
            await running.heard.until("never said")


async def test_a_log_that_cannot_be_prepared_stops_all(serving: Serving) -> None:
    async def fail() -> None:
        raise LogUnavailableError("nats://127.0.0.1:4222 has no JetStream")

    with pytest.RaisesGroup(pytest.RaisesExc(LogUnavailableError, match="has no JetStream")):
        async with serving(prepare=fail) as running:
            await running.heard.until("never said")


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
            await running.heard.until("nats was killed by SIGKILL; it starts again in 0.2 s")
            async with asyncio.timeout(60):
                while running.pids["nats"] in {first, None}:  # noqa: ASYNC110 - a file sets no event
                    await asyncio.sleep(0.005)
            assert nats.server.url == url
            pids = running.all_pids()
        await gone(*pids)
    finally:
        nats.close()


def commands(*flags: str) -> dict[str, Command]:
    config = DeploymentConfig(
        model="decoder_lm",
        checkpoint="/checkpoint",
        max_seq_len=64,
        node_groups=[NodeGroup(node_names=["prepare"], ranks=[0]), NodeGroup(node_names=["llm"], ranks=[1])],
    )
    options = ServeOptions(model="demo", told=configuration.settings_of(set_=flags), ready_file=None)
    listen = Listen(host="127.0.0.1", port=8000)
    found = launcher.commands(options, config, listen, "nats://127.0.0.1:4222", "sesame")
    return {one.name: one for one in found}


def test_there_is_one_worker_per_rank_and_they_start_first() -> None:
    assert list(commands()) == ["worker-0", "worker-1", "gateway", "conductor"]


def test_no_argument_holds_the_token() -> None:
    for one in commands().values():
        assert "sesame" not in " ".join(one.argv)
        assert one.env[environment.NATS_TOKEN] == "sesame"


def test_what_the_flags_say_is_handed_on_to_every_role_and_understood_the_same() -> None:
    flags = ("gateway.cors_origins=a, *", "model_kwargs.device=cuda:0", "kv_tokens=", "name=a = b")
    told = configuration.settings_of(set_=flags)

    for one in commands(*flags).values():
        handed = [text for flag, text in itertools.pairwise(one.argv) if flag == "--set"]
        assert configuration.settings_of(set_=handed) == told
