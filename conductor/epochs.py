"""Epochs: the terms in which conductors lead. One is opened by a record that only one of them can store."""

from typing import Final

from shared import faults
from shared.events import EpochOpened, MalformedEventError, decode, encode
from shared.log.port import Log, LogState, StoredRecord
from shared.subjects import CONDUCTOR_WRITER, Subjects

CLAIM_S: Final = 5.0
"""For how long the log may take to store a claim: so long can the election of its own leader last."""


async def claim(log: Log, subjects: Subjects, name: str, core_digest: str) -> int:
    """Open the next epoch; its position in the log.

    Raises:
        WrongLastSequenceError: another conductor opened one first.
        CapacityError: the log does not answer, or takes nothing.
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
    )
    faults.reach("conductor.claim.publishing")
    seq = await log.publish(subjects.epoch, encode(opened), expected_last_seq=last.seq if last else 0)
    faults.reach("conductor.claim.published")
    return seq


def epoch_after(last: StoredRecord | None, log: LogState) -> int:
    """The epoch that follows the one opened last.

    Every epoch is at most the sequence it is stored at. So if the log has forgotten the last one, or what
    stands there cannot be read, the next sequence is higher than any epoch there was.
    """
    if last is None:
        return 1 if log.first_seq <= 1 else 1 + log.last_seq
    try:
        return 1 + (decode(last.data).epoch or 0)
    except MalformedEventError:
        return 1 + last.seq
