"""Gaps in the positions of a log's records."""

from collections.abc import AsyncIterator

import pytest

from shared.log.nats.missing_records import gaps, joined
from shared.log.port import LogState, MissingRecords, StoredRecord


async def records(*seqs: int) -> AsyncIterator[StoredRecord]:
    for seq in seqs:
        yield StoredRecord(seq, "ds.walk.r", b"", 0)


@pytest.mark.parametrize(
    ("seqs", "first_seq", "last_seq", "expected"),
    [
        ((1, 2, 3), 1, 3, []),
        ((5, 6), 5, 6, []),  # the beginning has expired
        ((1, 4, 5), 1, 5, [(2, 3)]),
        ((1, 2), 1, 4, [(3, 4)]),
        ((), 5, 4, []),  # all have expired
    ],
)
async def test_positions_without_a_record_are_found(
    seqs: tuple[int, ...], first_seq: int, last_seq: int, expected: list[tuple[int, int]]
) -> None:
    state = LogState(
        first_seq=first_seq, last_seq=last_seq, created_ns=1, messages=len(seqs), bytes=len(seqs)
    )
    assert await gaps(records(*seqs), state) == expected


def test_ranges_and_single_positions_are_joined() -> None:
    assert joined([(7, 9)], [1, 2, 3, 8, 10, 12]) == [(1, 3), (7, 10), (12, 12)]


def test_missing_records_describe_themselves() -> None:
    assert str(MissingRecords(3, 3, "2.blk is missing")) == "record 3 is missing: 2.blk is missing"
    assert str(MissingRecords(3, 4, "2.blk is missing")) == "records 3 to 4 are missing: 2.blk is missing"
