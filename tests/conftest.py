"""Fixtures and hooks for all tests: one nats-server per run, a subject prefix per test, the fast lane."""

import gc
import itertools
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Final

import hypothesis
import pytest

from shared.log.nats.private_server import NatsServer
from shared.subjects import Subjects

_prefixes = itertools.count()
_running: list[pytest.Item] = []
_THRESHOLDS: Final = (700, 10, 100)
"""Of the cycle collector. The last is ten times Python's default: old objects are scanned rarely."""
_STARTS_PROCESS: Final = frozenset(
    {"os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "subprocess.Popen"}
)
_USES_NETWORK: Final = frozenset({"socket.bind", "socket.connect"})
_NEED_A_SERVER: Final = frozenset({"deployment", "log_url", "nats_server", "random_deployment"})
"""Fixtures that start a process: tests that use them need no marker."""
_WITH_PROCESSES: Final = frozenset({"cpu_kernels", "e2e"})
"""Folders whose tests need no marker: the first compiles kernels, the second serves models."""
_LONG: Final = frozenset({"attack", "chaos", "e2e", "fuzz", "simulation"})
"""Folders whose files take longest; each test process takes whole files."""

# One torch thread for oracles, engines and deployments alike, before anything imports torch: tiny models gain
# nothing from two, whose barriers spin and wait for the other test processes (20 times slower on busy cores).
os.environ.setdefault("OMP_NUM_THREADS", "1")


# No example of a property has a time limit: a busy machine is no fault of the code.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="leave out tests marked `processes` or `slow`")


def pytest_configure(config: pytest.Config) -> None:
    # Deployments in tests make their sealing keys there, and not in the developer's home.
    os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="dalsegno-state-")
    if config.getoption("--fast"):
        sys.addaudithook(_refuse_processes_and_network)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip the import of folders without a test of the fast lane."""
    return True if config.getoption("--fast") and collection_path.name in _WITH_PROCESSES else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        needs_a_server = not _NEED_A_SERVER.isdisjoint(getattr(item, "fixturenames", ()))
        if needs_a_server or item.path.parent.name in _WITH_PROCESSES:
            item.add_marker(pytest.mark.processes)
    if config.getoption("--fast"):
        slow = [item for item in items if any(map(item.get_closest_marker, ("processes", "slow")))]
        config.hook.pytest_deselected(items=slow)
        left_out = {*slow}
        items[:] = [item for item in items if item not in left_out]
    if os.environ.get("PYTEST_XDIST_WORKER"):
        _long_files_first(items)


def _long_files_first(items: list[pytest.Item]) -> None:
    """Sort the files that parallel processes take: short ones fill the end, so that they end together."""
    marked: Counter[Path] = Counter()
    for item in items:
        marked[item.path] += any(map(item.get_closest_marker, ("processes", "slow")))
    items.sort(key=lambda item: (item.path.parent.name not in _LONG, not marked[item.path]))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Refuse processes and network while a test runs, not while modules are imported."""
    _running.append(item)
    try:
        return (yield)
    finally:
        _running.clear()


def _refuse_processes_and_network(event: str, args: tuple[object, ...]) -> None:
    """Fail a test of the fast lane that does what its missing marker promises it does not."""
    if not _running:
        return
    is_network = event in _USES_NETWORK and isinstance(args[1], tuple)  # a Unix socket's address is a path
    if event in _STARTS_PROCESS or is_network:
        pytest.fail(
            f"expected no process and no network, found {event}: mark the test with pytest.mark.processes"
        )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exempt imported and collected objects from garbage collection: they stay until the end.

    Scanning these 700,000 objects took a third of the collection, and a fifth of the tests after it.
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
    """A running nats-server with JetStream. All tests share it: leave it running, use your own prefix."""
    server = NatsServer(tmp_path_factory.mktemp("nats"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def log_url(nats_server: NatsServer) -> str:
    return nats_server.url


@pytest.fixture
def subjects() -> Subjects:
    """Subjects under a prefix that no other test uses. The stream does not exist yet (see `provision`)."""
    return Subjects(f"t{next(_prefixes)}")
