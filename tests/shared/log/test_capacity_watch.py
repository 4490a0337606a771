"""The capacity watch reports each change once, and admits nothing that could not end."""

import pytest

from shared.log.capacity import Capacity
from shared.log.capacity_watch import CapacityWatch
from shared.log.memory import MemoryLog, MemoryStore
from shared.log.port import LogFullError, LogUnavailableError
from shared.subjects import Subjects


async def test_a_change_is_told_and_said_once(subjects: Subjects, caplog: pytest.LogCaptureFixture) -> None:
    server = MemoryStore(subjects)
    server.append(subjects.walk("r"), bytes(900))
    changes: list[str] = []
    watch = CapacityWatch(MemoryLog(server), lambda: changes.append(watch.reason))
    caplog.set_level("INFO")
    rooms = []
    for max_bytes in (None, 1_000, 1_000, 500, None, None):
        server.max_bytes = max_bytes
        await watch.poll()
        rooms.append(watch.capacity)

    assert rooms == [
        Capacity.FREE,
        Capacity.NEARLY_FULL,
        Capacity.NEARLY_FULL,
        Capacity.FULL,
        Capacity.FREE,
        Capacity.FREE,
    ]
    assert [bool(words) for words in changes] == [True, False]
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING", "INFO"]


async def test_nothing_begins_without_room_or_without_a_log(subjects: Subjects) -> None:
    server = MemoryStore(subjects)
    server.append(subjects.walk("r"), bytes(900))
    watch = CapacityWatch(MemoryLog(server))
    watch.require_capacity()  # not polled yet
    server.max_bytes = 1_000
    await watch.poll()
    with pytest.raises(
        LogFullError, match=r"the log is nearly full \(\d+ bytes of 1000 bytes\): no new requests"
    ):
        watch.require_capacity()
    server.stop()
    await watch.poll()
    with pytest.raises(LogUnavailableError, match="the log does not answer"):
        watch.require_capacity()
    server.start()
    server.max_bytes = None
    await watch.poll()
    watch.require_capacity()
