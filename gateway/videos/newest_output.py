"""The newest report of a request's workers, from the end of its output: progress, or a video's metadata.

A video has megabytes, and so have the checkpoints of the worker that makes it. So the output is read from its
end: its last record, and if that tells nothing, a few more before it.
"""

from collections.abc import Mapping
from contextlib import aclosing
from typing import Any, Final

from gateway.requests.status import PartStatus
from gateway.videos.request import VIDEO
from shared.events import MalformedEventError, OutputChunk, RequestSubmitted, decode
from shared.log.port import Log, StoredRecord
from shared.subjects import Subjects

PROGRESS: Final = "progress"
_POSITIONS: Final = (64, 1024)
"""Log positions before the last record that are searched, one after the other."""


async def newest_progress(
    log: Log, subjects: Subjects, event: RequestSubmitted, part: PartStatus
) -> dict[str, Any]:
    """The newest progress of a request that runs; empty if there is none near the end of its output."""
    metadata = await _newest(log, subjects, event, part, PROGRESS)
    found = metadata.get(PROGRESS)
    return found if isinstance(found, dict) else {}


async def video_metadata(
    log: Log, subjects: Subjects, event: RequestSubmitted, part: PartStatus
) -> Mapping[str, Any]:
    """The metadata of the video of a request that has ended; empty if it has none."""
    return await _newest(log, subjects, event, part, VIDEO)


async def _newest(
    log: Log, subjects: Subjects, event: RequestSubmitted, part: PartStatus, modality: str
) -> Mapping[str, Any]:
    """The metadata of the newest chunk of a modality, near the end of the output."""
    ends = [
        record
        for writer in part.writers
        if (record := await log.last(subjects.output(event.origin, part.id, writer))) is not None
    ]
    for record in sorted(ends, key=lambda one: -one.seq):
        chunk = _chunk(record, modality) or await _before(log, record, modality)
        if chunk is not None:
            return chunk.metadata
    return {}


async def _before(log: Log, last: StoredRecord, modality: str) -> OutputChunk | None:
    """The newest chunk of a modality on the subject of a record, before it."""
    for positions in _POSITIONS:
        found: OutputChunk | None = None
        start = max(1, last.seq - positions)
        async with aclosing(log.history([last.subject], start, last.seq)) as records:
            async for record in records:
                found = _chunk(record, modality) or found
        if found is not None or start == 1:
            return found
    return None


def _chunk(record: StoredRecord, modality: str) -> OutputChunk | None:
    """The chunk in a record, if it has the modality; a video is no advice, and progress is nothing else."""
    try:
        event = decode(record.data)
    except MalformedEventError:
        return None
    is_wanted = (
        isinstance(event, OutputChunk)
        and event.modality == modality
        and event.advisory == (modality == PROGRESS)
    )
    return event if isinstance(event, OutputChunk) and is_wanted else None
