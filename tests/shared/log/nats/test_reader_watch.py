"""The watch over readers, on a real server with a key for each role."""

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from shared.log.nats import jetstream
from shared.log.nats.credentials import Credentials
from shared.log.nats.durability import StreamPolicy
from shared.log.nats.permissions import authorization
from shared.log.nats.private_server import NatsServer
from shared.log.nats.reader_watch import ReaderWatch
from shared.log.port import Log, LogUnavailableError
from tests.shared.log.greedy import greedy_readers
from tests.shared.log.roles import ROLES, SUBJECTS, guarded

pytestmark = pytest.mark.processes

MOST = 200
PER_KEY = 20


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[NatsServer]:
    with guarded(tmp_path) as server:
        await provide(server, MOST)
        yield server


async def provide(server: NatsServer, most: int) -> None:
    policy = StreamPolicy(max_consumers=most)
    await jetstream.provision(server.url, ROLES["provisioner"], SUBJECTS, policy)


async def open_log(server: NatsServer, role: str) -> Log:
    return await jetstream.connect(server.url, credentials=ROLES[role], subjects=SUBJECTS, name=role)


async def open_watch(server: NatsServer, *, most: int = MOST) -> ReaderWatch:
    watch = ReaderWatch(server.url, SUBJECTS.stream, max_consumers=most, per_key=PER_KEY)
    await watch.open(ROLES["conductor"], "conductor")
    return watch


async def test_a_greedy_key_keeps_its_limit_and_a_reader_of_another_key_is_left_alone(
    server: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = await open_log(server, "gateway")
    await gateway.publish(SUBJECTS.request("r"), b"1")
    records = gateway.read([SUBJECTS.request("r")], 1)
    await anext(records)
    watch = await open_watch(server)
    async with greedy_readers(server.url, ROLES["client"], SUBJECTS.stream) as greedy:
        await greedy.is_full.wait()
        await watch.check()
    assert watch.ended >= MOST - PER_KEY - 1
    async with asyncio.timeout(10):  # the server deletes after its reply, and the last of the fight end
        while (found := (await gateway.state()).consumers) > PER_KEY + 1:
            await watch.check()
    assert found >= 1
    await gateway.publish(SUBJECTS.request("r"), b"2")
    assert (await anext(records)).data == b"2"
    assert f"the log has {MOST} of {MOST} readers" in caplog.text
    assert "readers of _INBOX_client: a key may have 20 (nats.max_consumers_per_key)" in caplog.text
    await records.aclose()
    await watch.close()
    await gateway.close()


async def test_a_limit_that_differs_from_the_configured_one_is_named_once(
    server: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    watch = await open_watch(server, most=300)
    await watch.check()
    await watch.check()
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "expected max_consumers 300 (nats.max_consumers), found 200" in warnings[0]
    await watch.close()


async def test_a_server_configured_by_an_earlier_version_costs_the_limit_and_not_the_conductor(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    earlier = authorization(ROLES, SUBJECTS).replace(f', "$JS.API.CONSUMER.LIST.{SUBJECTS.stream}"', "")
    assert "CONSUMER.LIST" not in earlier
    server = NatsServer(tmp_path, authorization=earlier)
    server.start()
    await provide(server, MOST)
    watch = await open_watch(server)
    async with greedy_readers(server.url, ROLES["client"], SUBJECTS.stream) as greedy:
        await greedy.is_full.wait()
        await watch.run(lambda: True)  # returns: it cannot do its work
    assert "grant the conductor publishing to $JS.API.CONSUMER.LIST.DS_LOG" in caplog.text
    await watch.close()
    server.kill()


async def test_provisioning_changes_the_limit_of_an_existing_stream_and_refuses_another_result(
    server: NatsServer,
) -> None:
    log = await open_log(server, "reader")
    assert (await log.state()).max_consumers == MOST
    await provide(server, 2 * MOST)
    assert (await log.state()).max_consumers == 2 * MOST
    await log.close()


async def test_an_accounts_lower_limit_is_named(tmp_path: Path) -> None:
    accounts = "accounts { A { jetstream { max_consumers: 100 }, users: [{user: a, password: a}] } }"
    server = NatsServer(tmp_path, authorization=accounts)
    server.start()
    with pytest.raises(LogUnavailableError, match="consumer"):
        await jetstream.provision(
            server.url, Credentials(user="a", password="a"), SUBJECTS, StreamPolicy(max_consumers=500)
        )
    server.kill()
