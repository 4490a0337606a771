"""Records that a log has lost: of a block file that was cut off, damaged or removed.

Records leave the log only at its beginning, when they expire. So a position without a record, between two
that have one or before the log's end, was lost. A server skips such records silently, and counts some of
them only when it reads their block. So the whole log has to be read once.
"""

from collections.abc import AsyncIterator, Iterable

from shared.log.port import LogState, StoredRecord


async def gaps(records: AsyncIterator[StoredRecord], state: LogState) -> list[tuple[int, int]]:
    """Return the ranges without a record: `records` are all that the log delivers, in order."""
    found = []
    before = state.first_seq - 1
    async for record in records:
        if record.seq > before + 1:
            found.append((before + 1, record.seq - 1))
        before = record.seq
    if state.messages and before < state.last_seq:
        found.append((before + 1, state.last_seq))
    return found


def joined(found: Iterable[tuple[int, int]], lost: Iterable[int]) -> list[tuple[int, int]]:
    """Return the ranges `found` together with the positions `lost`, sorted and without overlap."""
    ranges: list[tuple[int, int]] = []
    for first, last in sorted([*found, *((seq, seq) for seq in lost)]):
        if ranges and first <= ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], max(ranges[-1][1], last))
        else:
            ranges.append((first, last))
    return ranges
