"""The log in memory satisfies the contract."""

from collections.abc import AsyncIterator, Callable

import pytest

from shared.log.memory import MemoryLog, MemoryStore, matches
from shared.log.port import Log
from shared.subjects import Subjects
from tests.shared.log.contract import LogContract


class _FakeDeployment:
    def __init__(self, subjects: Subjects) -> None:
        self.subjects = subjects
        self.server = MemoryStore(subjects)
        self.logs: list[MemoryLog] = []

    async def open(self, on_change: Callable[[bool], None] | None = None) -> Log:
        self.logs.append(MemoryLog(self.server, on_change=on_change))
        return self.logs[-1]

    async def stop(self) -> None:
        self.server.stop()

    async def start(self) -> None:
        self.server.start()

    async def recreate(self) -> None:
        self.server.recreate()
        self.server.start()

    async def fill(self) -> None:
        self.server.set_max_messages(len(self.server.records))

    async def set_max_messages(self) -> None:
        self.server.set_max_messages(None)


@pytest.fixture
async def deployment(subjects: Subjects) -> AsyncIterator[_FakeDeployment]:
    deployment = _FakeDeployment(subjects)
    yield deployment
    for log in deployment.logs:
        await log.close()


class TestFakeLog(LogContract):
    pass


@pytest.mark.parametrize(
    ("pattern", "subject", "does"),
    [
        ("ds.walk.r", "ds.walk.r", True),
        ("ds.walk.*", "ds.walk.r", True),
        ("ds.*.r", "ds.walk.r", True),
        ("ds.walk.>", "ds.walk.r", True),
        ("ds.>", "ds.walk.r", True),
        ("ds.walk.*", "ds.walk.r.more", False),
        ("ds.walk.>", "ds.walk", False),
        ("ds.walk", "ds.walk.r", False),
        ("ds.walk.r", "ds.walk", False),
        ("ds.walk.r", "ds.walk.x", False),
    ],
)
def test_patterns_match_as_they_do_in_nats(pattern: str, subject: str, does: bool) -> None:
    assert matches(pattern, subject) is does
