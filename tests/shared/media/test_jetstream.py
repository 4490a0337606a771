"""The contract of the media store, on a real nats-server."""

import asyncio
import runpy
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import nats
import pytest

from shared.log.nats import api
from shared.log.nats.connection import NatsConnection
from shared.log.nats.durability import MEDIA_AGE_FACTOR, StreamPolicy
from shared.log.nats.jetstream import provision
from shared.log.nats.private_server import NatsServer
from shared.media.addresses import owner_token
from shared.media.jetstream import connect
from shared.media.store import MediaStore, MediaStoreUnavailableError
from shared.subjects import Subjects
from tests.e2e.clients import ROOT
from tests.shared.media.contract import DIGEST, PICTURE, MediaStoreContract, content, put

pytestmark = pytest.mark.processes


class OnNats:
    """A media store on a real server."""

    limit_s = 1000.0

    def __init__(self, server: NatsServer, subjects: Subjects) -> None:
        self.server = server
        self.subjects = subjects
        self.policy = StreamPolicy(max_age_s=self.limit_s / MEDIA_AGE_FACTOR)
        self._ahead_ns = 0
        self._stores: list[MediaStore] = []
        self._connection = NatsConnection(server.url)

    async def start(self) -> None:
        await self._connection.open(credentials=self.server.credentials, name="test", timeout_s=5)
        await self.provide(self.policy)

    async def provide(self, policy: StreamPolicy) -> None:
        await provision(self.server.url, self.server.credentials, self.subjects, policy)

    async def open(self) -> MediaStore:
        store = await connect(
            self.server.url,
            credentials=self.server.credentials,
            subjects=self.subjects,
            name="test",
            may_delete=True,
            clock=lambda: time.time_ns() + self._ahead_ns,
        )
        self._stores.append(store)
        return store

    async def close(self) -> None:
        for store in self._stores:
            await store.close()
        await self._connection.close()

    async def age(self, seconds: float) -> None:
        self._ahead_ns += int(seconds * 1e9)

    async def expire(self) -> None:
        await self.provide(replace(self.policy, max_age_s=0.1))  # the shortest that a server accepts
        async with asyncio.timeout(30):
            while await self.stored_bytes():  # the server tells nobody when a record has expired
                pass

    async def fill(self) -> None:
        await self.provide(replace(self.policy, media_max_bytes=await self.stored_bytes() + 2000))

    async def overwrite(self, tenant: str | None, digest: str, number: int, data: bytes) -> None:
        subject = self.subjects.medium(owner_token(tenant), digest, number)
        ack = await self._connection.call_api(subject, data, api.PubAck)
        assert ack.error is None

    async def stored_bytes(self) -> int:
        info = await self._connection.call_api(
            f"$JS.API.STREAM.INFO.{self.subjects.media_stream}", b"", api.StreamInfo
        )
        return info.log_state().bytes


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path_factory.mktemp("nats"), max_payload_bytes=1024 * 1024)
    server.start()
    yield server
    server.kill()


@pytest.fixture
async def deployment(server: NatsServer, subjects: Subjects) -> AsyncIterator[OnNats]:
    deployment = OnNats(server, subjects)
    await deployment.start()
    yield deployment
    await deployment.close()


class TestJetStreamMediaStore(MediaStoreContract):
    """The contract's tests."""


async def test_an_upload_outlives_a_restart_of_the_server(deployment: OnNats) -> None:
    store = await deployment.open()
    await put(store)

    async def restart() -> None:
        deployment.server.kill()
        deployment.server.start()  # in this thread: the server ends with it

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(restart())
        uploads = [tasks.create_task(put(store, PICTURE[n:])) for n in range(1, 9)]
    for upload in uploads:
        assert len(await content(store, upload.result().digest)) == upload.result().size


async def test_the_example_of_other_clients_stores_a_medium(deployment: OnNats) -> None:
    folder = ROOT / "docs" / "examples"
    sys.path.insert(0, str(folder))
    try:
        store = runpy.run_path(str(folder / "ask_with_image.py"))["store"]
    finally:
        sys.path.remove(str(folder))
    client = await nats.connect(deployment.server.url, token=deployment.server.token)
    digest = await store(client, deployment.subjects.prefix, PICTURE, "image/png")
    await client.close()

    ours = await deployment.open()
    assert digest == DIGEST
    assert (await ours.keep(digest, tenant=None)).content_type == "image/png"
    assert await content(ours, digest) == PICTURE


async def test_a_server_without_the_stream_is_told_apart(server: NatsServer) -> None:
    store = await connect(server.url, credentials=server.credentials, subjects=Subjects("never"), name="test")
    with pytest.raises(MediaStoreUnavailableError, match=r"NEVER_MEDIA.*run `dalsegno provision`"):
        await put(store)
    await store.close()
