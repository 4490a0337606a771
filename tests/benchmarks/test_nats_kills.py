"""What the benchmark of a hundred kills finds, in three; and that it would find more."""

from pathlib import Path

import pytest

from benchmarks import nats_kills
from shared.log.port import StoredRecord


@pytest.mark.processes
async def test_three_kills_of_the_server_under_load_lose_nothing_acked(tmp_path: Path) -> None:
    outcome = await nats_kills.run(tmp_path / "nats", rounds=3, seed=3)

    assert outcome.is_clean, outcome
    assert outcome.rounds == 3
    assert outcome.stored >= outcome.acked > 4 * nats_kills._ALIVE
    assert outcome.longest_gap_s > 0


async def test_what_is_lost_doubled_or_misread_is_counted() -> None:
    def stored(seq: int, data: bytes, subject: str = nats_kills._POSTED) -> StoredRecord:
        return StoredRecord(seq, subject, data, seq)

    load = nats_kills._Load(
        posted={b"a", b"b", b"c"},
        acked={1: b"a", 2: b"b", 9: b"t"},
        read=[stored(1, b"a"), stored(2, b"else")],
    )
    history = [
        stored(1, b"a"),
        stored(2, b"a"),
        stored(3, b"b"),
        stored(4, b"t", nats_kills._IN_TURN),
        stored(5, b"t", nats_kills._IN_TURN),
    ]
    found = nats_kills._compared(1, load, history)

    assert (found.lost, found.unstored, found.doubled, found.in_turn_doubled, found.misread) == (
        2,
        1,
        1,
        1,
        1,
    )
    assert not found.is_clean
