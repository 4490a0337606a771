"""The log on a real nats-server satisfies the contract."""

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from shared.log.nats.durability import StreamPolicy
from shared.log.nats.jetstream import JetStreamLog, connect, provision
from shared.log.nats.private_server import NatsServer
from shared.subjects import Subjects
from tests.shared.log.admin import delete_stream, use_up_consumers
from tests.shared.log.contract import LogContract


class _JetStreamDeployment:
    """One server per test, because tests stop it, fill it, and delete its stream.

    Without `has_consumers` another key has used up the stream's only consumer, so every reader has to poll.
    """

    def __init__(self, subjects: Subjects, data_dir: Path, *, has_consumers: bool) -> None:
        self.subjects = subjects
        self.has_consumers = has_consumers
        self.server = NatsServer(data_dir, max_payload_bytes=1024 * 1024)
        self.logs: list[JetStreamLog] = []

    async def open(self, on_change: Callable[[bool], None] | None = None) -> JetStreamLog:
        log = await connect(
            self.server.url,
            credentials=self.server.credentials,
            subjects=self.subjects,
            name="test",
            on_change=on_change,
        )
        self.logs.append(log)
        return log

    async def provide(self, max_bytes: int | None = None) -> None:
        await self._provide(self.server, max_bytes)

    async def _provide(self, server: NatsServer, max_bytes: int | None) -> None:
        policy = StreamPolicy(max_bytes=max_bytes)
        if not self.has_consumers:
            policy = replace(policy, max_consumers=1)
        await provision(server.url, server.credentials, self.subjects, policy)
        if not self.has_consumers:
            await use_up_consumers(server, self.subjects.stream)

    async def stop(self) -> None:
        self.server.kill()

    async def start(self) -> None:
        self.server.start()

    async def recreate(self) -> None:
        # On another port, so that the deployment does not see an incomplete state.
        aside = NatsServer(self.server.log_file.parent)
        aside.start()
        await delete_stream(aside, self.subjects.stream)
        await self._provide(aside, None)
        aside.stop()
        self.server.start()

    async def fill(self) -> None:
        log = await self.open()
        await log.publish(self.subjects.walk("filler"), bytes(4096))
        await self.provide(max_bytes=(await log.state()).bytes + 1)

    async def set_max_messages(self) -> None:
        await self.provide(max_bytes=None)


@pytest.fixture(params=[True, False], ids=["consumers", "polling"])
async def deployment(
    subjects: Subjects, tmp_path: Path, request: pytest.FixtureRequest
) -> AsyncIterator[_JetStreamDeployment]:
    deployment = _JetStreamDeployment(subjects, tmp_path / "nats", has_consumers=request.param)
    deployment.server.start()
    await deployment.provide()
    yield deployment
    for log in deployment.logs:
        await log.close()
    deployment.server.kill()


@pytest.mark.processes
class TestJetStreamLog(LogContract):
    pass
