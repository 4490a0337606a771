"""The jobs of a deployment, by the log. It is the only store, so every gateway answers the same.

A list reads submissions in windows of log positions, from the newest backwards, and stops at the end of the
page. A deployment serves one model; where that makes videos, almost every submission is a job, so a page
costs about its own size. At worst (all jobs are another tenant's) it reads every submission of the log, and
never their outputs.

Records of the log are not removed one by one. A deletion is an event of its own, after which all gateways
answer as if the job did not exist; its bytes leave the log with their age.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final, Literal

from gateway.requests import recorded_answer
from gateway.requests.relay import RequestForgottenError
from gateway.requests.request_ids import is_forgotten
from gateway.requests.service import Gateway
from gateway.requests.status import ENDED, StatusFold, log_timeout
from gateway.videos.jobs import VideoJob, is_job
from gateway.videos.newest_output import newest_progress, video_metadata
from shared.errors import ClientError
from shared.events import MalformedEventError, RequestSubmitted, decode
from shared.ids import parse_request_id
from shared.log.port import StoredRecord

Order = Literal["asc", "desc"]
_WINDOW: Final = 4096
_WIDER: Final = 4
_WIDEST: Final = 65_536
"""The first window of log positions; each is `_WIDER` times as long as the one before, up to the widest.

The log has its time limit for each window, and reads some 50,000 submissions a second.
"""
_BATCH: Final = 25
"""Jobs whose statuses are read at once."""
_VIDEO: Final = b"video"
"""In the bytes of every submission of a job; others need not be decoded."""


class NoVideoError(ClientError):
    """There is no such job, or it is another tenant's."""

    code = "video_not_found"
    status = 404
    param = "video_id"

    def __init__(self, video_id: str) -> None:
        super().__init__(
            f"there is no video {video_id[:80]!r} here: it was deleted, was never asked for with this API "
            "key, or is older than the log"
        )


@dataclass(frozen=True, slots=True)
class VideoJobs:
    """The jobs of one tenant; None is that of a deployment without keys."""

    gateway: Gateway
    tenant: str | None

    async def one(self, video_id: str) -> VideoJob:
        """Return a job.

        Raises:
            NoVideoError, RequestForgottenError: there is none, or the log holds it no more.
            LogUnavailableError: the log does not answer.
        """
        request_id = parse_request_id(video_id)
        fold = await self._statuses([request_id])
        for job in await self._jobs(fold):
            return job
        is_there = fold.parts[request_id].event is not None
        if not is_there and is_forgotten(request_id, await self.gateway.log.state()):
            raise RequestForgottenError(request_id)
        raise NoVideoError(video_id)

    async def page(self, *, limit: int, after: str, order: Order) -> tuple[list[VideoJob], bool]:
        """Return up to `limit` jobs behind that of the id `after`, and whether there are more.

        Raises:
            NoVideoError: there is no job `after`.
            LogUnavailableError: the log does not answer.
        """
        found: list[VideoJob] = []
        start = (await self.one(after)).part.seq if after else None
        async with aclosing(self._ids(start, order)) as batches:
            async for ids in batches:
                found += await self._jobs(await self._statuses(ids))
                if len(found) > limit:
                    break
        return found[:limit], len(found) > limit

    async def delete(self, job: VideoJob) -> None:
        """Cancel a job unless it has ended, and delete its output."""
        await recorded_answer.delete(self.gateway, job.id)

    async def _statuses(self, ids: Sequence[str]) -> StatusFold:
        """The statuses of requests."""
        fold = StatusFold(self.gateway.subjects, ids)
        async with log_timeout():
            await fold.read(self.gateway.log)
        return fold

    async def _jobs(self, fold: StatusFold) -> list[VideoJob]:
        """The tenant's jobs among requests, in their order, without those that are deleted."""
        jobs = [
            VideoJob(part=part, event=part.event)
            for part in fold.parts.values()
            if part.event is not None and is_job(part.event, self.tenant) and not part.is_deleted
        ]
        async with log_timeout():
            return [await self._reported(job) for job in jobs]

    async def _reported(self, job: VideoJob) -> VideoJob:
        """A job with what its workers reported last."""
        log, subjects, part, event = self.gateway.log, self.gateway.subjects, job.part, job.event
        if part.status == "finished":
            video = await video_metadata(log, subjects, event, part)
            return VideoJob(part=part, event=event, video=video)
        if part.status in ENDED or part.status == "waiting":
            return job
        progress = await newest_progress(log, subjects, event, part)
        return VideoJob(part=part, event=event, progress=progress)

    async def _ids(self, after: int | None, order: Order) -> AsyncGenerator[list[str], None]:
        """The ids of the tenant's submissions behind a position, in batches, each id once."""
        seen: set[str] = set()
        async with aclosing(self._windows(after, order)) as windows:
            async for start, stop in windows:
                found = await self._submitted(start, stop)
                ids = [one for one in (found if order == "asc" else reversed(found)) if one not in seen]
                seen.update(ids)
                for number in range(0, len(ids), _BATCH):
                    yield ids[number : number + _BATCH]

    async def _windows(self, after: int | None, order: Order) -> AsyncGenerator[tuple[int, int], None]:
        """Ranges of log positions behind a position, each longer than the one before."""
        state = await self.gateway.log.state()
        first, last, size = state.first_seq, state.last_seq, _WINDOW
        if order == "asc":
            first = first if after is None else after + 1
            while first <= last:
                yield first, min(last, first + size - 1)
                first, size = first + size, min(size * _WIDER, _WIDEST)
            return
        last = last if after is None else after - 1
        while first <= last:
            yield max(first, last - size + 1), last
            last, size = last - size, min(size * _WIDER, _WIDEST)

    async def _submitted(self, start: int, stop: int) -> list[str]:
        """The ids of the tenant's jobs that were submitted in a range of positions, each once."""
        log, subjects = self.gateway.log, self.gateway.subjects
        found: dict[str, None] = {}
        async with log_timeout(), aclosing(log.history([subjects.request("*")], start, stop)) as records:
            async for record in records:
                address, event = subjects.parse(record.subject), _submission(record)
                if address is not None and event is not None and is_job(event, self.tenant):
                    found[str(address.request_id)] = None
        return list(found)


def _submission(record: StoredRecord) -> RequestSubmitted | None:
    """The submission in a record, if it may be a job's."""
    if _VIDEO not in record.data:
        return None
    try:
        event = decode(record.data, "request")
    except MalformedEventError:
        return None
    return event if isinstance(event, RequestSubmitted) else None
