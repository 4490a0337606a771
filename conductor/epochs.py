"""Epochs: the terms of leading conductors. Only one conductor can store the record that opens an epoch."""

from collections.abc import Sequence
from typing import Final

from shared import faults
from shared.events import EpochOpened, MalformedEventError, ProcessEnd, decode, encode
from shared.log.port import Log, LogState, StoredRecord
from shared.subjects import CONDUCTOR_WRITER, Subjects

CLAIM_S: Final = 5.0
"""Seconds that the log may take to store a claim; the election of its own leader can take that long."""


async def claim(
    log: Log, subjects: Subjects, name: str, core_digest: str, *, ended: Sequence[ProcessEnd] = ()
) -> int:
    """Open the next epoch; return its position in the log. `ended` are the processes before this one.

    Raises:
        WrongLastSequenceError: another conductor opened one first.
        CapacityError: the log does not answer, or accepts no events.
    """
    last = await log.last(subjects.epoch)
    epoch = epoch_after(last, await log.state())
    opened = EpochOpened(
        id=f"epoch.{epoch}.{name}",
        writer=CONDUCTOR_WRITER,
        number=0,
        epoch=epoch,
        conductor=name,
        core=core_digest,
        ended=list(ended),
    )
    faults.reach("conductor.claim.publishing")
    seq = await log.publish(subjects.epoch, encode(opened), expected_last_seq=last.seq if last else 0)
    faults.reach("conductor.claim.published")
    return seq


def epoch_after(last: StoredRecord | None, log: LogState) -> int:
    """The epoch that follows the last opened one.

    An epoch is at most the sequence number of its record. If the log no longer has the last record, or it is
    unreadable, the next sequence number is therefore higher than any earlier epoch.
    """
    if last is None:
        return 1 if log.first_seq <= 1 else 1 + log.last_seq
    try:
        return 1 + (decode(last.data).epoch or 0)
    except MalformedEventError:
        return 1 + last.seq
