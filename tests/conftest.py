"""What every test may use: one private nats-server per run, and a prefix of its own for each test."""

import gc
import itertools
from collections.abc import Generator, Iterator

import pytest

from shared.log.nats.private_server import NatsServer
from shared.subjects import Subjects

_prefixes = itertools.count()
_THRESHOLDS = (700, 10, 100)
"""Of the collector of cycles. The last is ten times Python's: everything old is looked at seldom."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Leave what is imported and collected to itself: it stays, and there is nothing to find in it.

    Looking through its 700,000 objects took a third of the collection, and a fifth of the tests behind it.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(*_THRESHOLDS)
        gc.enable()


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
