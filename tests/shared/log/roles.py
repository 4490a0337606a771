"""A server with a deployment's roles, and a plain client that records denials."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Final

from nats.aio.client import Client

from shared.log.nats import nkeys
from shared.log.nats.credentials import Credentials
from shared.log.nats.permissions import authorization
from shared.log.nats.private_server import NatsServer
from shared.subjects import Subjects

SUBJECTS: Final = Subjects("ds")
ROLES: Final = {
    "provisioner": Credentials(seed=nkeys.new_seed()),
    "conductor": Credentials(seed=nkeys.new_seed()),
    "gateway": Credentials(seed=nkeys.new_seed()),
    "worker-0": Credentials(seed=nkeys.new_seed()),
    "worker-1": Credentials(seed=nkeys.new_seed()),
    "reader": Credentials(seed=nkeys.new_seed()),
    "client": Credentials(user="client", password="sesame"),
    "client-billing": Credentials(seed=nkeys.new_seed()),
}
"""One of them by password: the server knows both."""


@contextmanager
def guarded(folder: Path) -> Iterator[NatsServer]:
    """A server that knows only the roles; it has no stream yet."""
    server = NatsServer(folder, authorization=authorization(ROLES, SUBJECTS))
    server.start()
    try:
        yield server
    finally:
        server.kill()


class Plain(Client):  # type: ignore[misc]  # nats-py's types are not read
    """nats-py's client with a role's credentials."""

    def __init__(self) -> None:
        super().__init__()
        self.denied: list[str] = []

    async def show(self, server: NatsServer, credentials: Credentials) -> None:
        self._public_nkey = credentials.public_key
        await self.connect(
            server.url,
            user=credentials.user,
            password=credentials.password,
            signature_cb=credentials.sign if credentials.seed is not None else None,
            inbox_prefix=credentials.inbox_prefix,
            error_cb=self._note,
            allow_reconnect=False,
        )

    async def _note(self, error: Exception) -> None:
        self.denied.append(str(error).removeprefix("nats: permissions violation for "))

    async def settle(self) -> list[str]:
        """Return the denials of all earlier operations that were not returned before."""
        for _ in range(2):  # nats-py's own question overtakes what it has not written yet
            await self.flush()
        denied, self.denied = self.denied, []
        return denied


@asynccontextmanager
async def plain(server: NatsServer, role: str) -> AsyncIterator[Plain]:
    client = Plain()
    await client.show(server, ROLES[role])
    try:
        yield client
    finally:
        await client.close()
