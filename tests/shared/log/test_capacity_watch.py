"""Who watches the room says what changed, once, and lets nothing begin that could not end."""

import pytest

from shared.log.capacity import Room
from shared.log.capacity_watch import RoomWatch
from shared.log.memory import MemoryLog, MemoryStore
from shared.log.port import LogFullError, LogUnavailableError
from shared.subjects import Subjects


async def test_a_change_is_told_and_said_once(subjects: Subjects, caplog: pytest.LogCaptureFixture) -> None:
    server = MemoryStore(subjects)
    server.append(subjects.walk("r"), bytes(900))
    changes: list[str] = []
    watch = RoomWatch(MemoryLog(server), lambda: changes.append(watch.words))
    caplog.set_level("INFO")
    rooms = []
    for max_bytes in (None, 1_000, 1_000, 500, None, None):
        server.max_bytes = max_bytes
        await watch.look()
        rooms.append(watch.room)

    assert rooms == [Room.FREE, Room.NEARLY_FULL, Room.NEARLY_FULL, Room.FULL, Room.FREE, Room.FREE]
    assert [bool(words) for words in changes] == [True, False]
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING", "INFO"]


async def test_nothing_begins_without_room_or_without_a_log(subjects: Subjects) -> None:
    server = MemoryStore(subjects)
    server.append(subjects.walk("r"), bytes(900))
    watch = RoomWatch(MemoryLog(server))
    watch.check()  # nobody has looked yet
    server.max_bytes = 1_000
    await watch.look()
    with pytest.raises(
        LogFullError, match=r"the log is nearly full \(\d+ bytes of 1000 bytes\): nothing new"
    ):
        watch.check()
    server.stop()
    await watch.look()
    with pytest.raises(LogUnavailableError, match="the log does not answer"):
        watch.check()
    server.start()
    server.max_bytes = None
    await watch.look()
    watch.check()
