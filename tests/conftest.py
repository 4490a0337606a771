"""What every test may use: one private nats-server per run, and a prefix of its own for each test."""

import itertools
from collections.abc import Iterator

import pytest

from shared.log.server import NatsServer
from shared.subjects import Subjects

_prefixes = itertools.count()


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """A running nats-server with JetStream; shared, so leave it running and keep to your own prefix."""
    server = NatsServer(tmp_path_factory.mktemp("nats"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def log_url(nats_server: NatsServer) -> str:
    return nats_server.url


@pytest.fixture
def subjects() -> Subjects:
    """Subjects under a prefix no other test uses; the stream is not made yet (see `provision`)."""
    return Subjects(f"t{next(_prefixes)}")
