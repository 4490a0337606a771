"""Reading by single requests: what is skipped, and what is not."""

import asyncio

from shared.log.nats import polling
from shared.log.nats.cursor import Cursor
from shared.log.port import LogState, StoredRecord


class _Log:
    """A log that counts the requests for its records. Those before `first_seq` have expired."""

    def __init__(self, wanted: set[int], last_seq: int, first_seq: int = 1) -> None:
        self.requests = 0
        self._wanted = wanted
        self._state = LogState(
            first_seq=first_seq, last_seq=last_seq, created_ns=1, messages=last_seq, bytes=0
        )

    async def get(self, seq: int) -> StoredRecord | None:
        self.requests += 1
        if seq < self._state.first_seq:
            return None
        return StoredRecord(seq, "ds.mine" if seq in self._wanted else "ds.other", b"", seq)

    async def next_on(self, subject: str, seq: int) -> StoredRecord | None:
        assert subject == "ds.mine"
        found = [one for one in self._wanted if one > max(seq, self._state.first_seq - 1)]
        return await self.get(min(found)) if found else None

    async def state(self) -> LogState:
        return self._state


def read(log: _Log, end_seq: int) -> list[int]:
    """Return the positions of the records that a reader gets."""
    cursor = Cursor(1, end_seq, lambda _: None, max_pending=100_000, max_pending_bytes=1 << 30)
    cursor.attaching()
    source = polling.Source(log.get, log.next_on, log.state)
    asyncio.run(polling.poll(cursor, ["ds.mine"], source))
    assert cursor.finished
    found = []
    while (record := cursor.take()) is not None:
        found.append(record.seq)
    return found


def test_a_few_records_of_a_long_log_take_few_requests() -> None:
    log = _Log({1, 2, 700_000, 700_001, 999_999}, 1_000_000)
    assert read(log, 1_000_000) == [1, 2, 700_000, 700_001, 999_999]
    assert log.requests < 1_000


def test_expired_records_are_not_asked_for() -> None:
    log = _Log(set(range(900_000, 900_300)), 900_400, first_seq=900_100)
    assert read(log, 900_400) == list(range(900_100, 900_300))
    assert log.requests < 500


def test_an_end_that_has_expired_ends_the_reading() -> None:
    log = _Log(set(), 1_000_000, first_seq=900_000)
    assert read(log, 500_000) == []
    assert log.requests == 0


def test_neighbouring_records_are_all_read() -> None:
    wanted = set(range(1, 2_000, 3))
    assert read(_Log(wanted, 2_000), 2_000) == sorted(wanted)
