"""The content of a complete job: its video, read from the log into a file, or pictures of it.

The file is sent by Starlette, which knows ranges, and removed after that. A job's content never changes.
"""

import asyncio
import tempfile
from collections.abc import Iterable
from contextlib import aclosing, suppress
from email.utils import formatdate
from pathlib import Path
from typing import Final

from starlette.datastructures import Headers
from starlette.responses import FileResponse, Response
from starlette.types import Message, Receive, Scope, Send

from gateway.errors import ErrorResponse, HttpError, InvalidParamError
from gateway.generate.values import OutputValue, ValueAssembler
from gateway.requests.relay import Failed, Relay
from gateway.requests.service import Gateway
from gateway.videos import pictures
from gateway.videos.jobs import VideoJob
from gateway.videos.request import VIDEO
from shared.errors import ClientError
from shared.events import Failure, OutputChunk
from shared.validation_errors import described

VARIANTS: Final = (VIDEO, "thumbnail", "spritesheet")
_SAFE: Final = {
    "content-disposition": "attachment",
    "x-content-type-options": "nosniff",
    "cache-control": "no-store",
}
"""Headers of files: a browser must not take them for a page of this origin."""
_ERRORS: Final = 400
"""The least HTTP status that is an error."""


class NotReadyError(ClientError):
    """The job is not complete; OpenAI's client would repeat a request that gets 409."""

    code = "video_not_ready"
    status = 404
    param = "video_id"

    def __init__(self, video_id: str, status: str) -> None:
        super().__init__(
            f"the video {video_id!r} is {status}: its content is there once GET /v1/videos/{video_id} says "
            "completed"
        )


class NoContentError(ClientError):
    """The job ended without a video."""

    code = "no_video"
    status = 404
    param = "video_id"


class _RemovedFileResponse(FileResponse):
    """A file that is removed once it is sent, or its client has left. A range beyond it is our error."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refused = False

        async def send_unless_refused(message: Message) -> None:
            nonlocal refused
            refused = refused or message.get("status", 200) >= _ERRORS
            if not refused:
                await send(message)

        try:
            await super().__call__(scope, receive, send_unless_refused)
            if refused:
                await _range_error(scope, Path(self.path))(scope, receive, send)
        finally:
            _remove(Path(self.path))


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink()


def _range_error(scope: Scope, path: Path) -> Response:
    size = path.stat().st_size
    found = described(Headers(scope=scope).get("range", ""))
    message = f"range: expected `bytes=FIRST-LAST` within the {size} bytes of the video, found {found}"
    error = HttpError(status=416, code="invalid_range", message=message, param="range")
    return ErrorResponse(error, {"content-range": f"bytes */{size}"})


async def content_of(gateway: Gateway, job: VideoJob, variant: str) -> Response:
    """The response with a job's content.

    Raises:
        InvalidParamError: there is no such variant.
        NotReadyError, NoContentError: the job is not complete, or has no video.
        LogUnavailableError: the log does not answer.
    """
    if variant not in VARIANTS:
        raise InvalidParamError(
            "variant", f"variant: expected one of {', '.join(VARIANTS)}, found {described(variant)}"
        )
    if (failure := job.failure) is not None:
        raise NoContentError(f"the video {job.id!r} failed, so it has no content: {failure.message}")
    if job.status != "completed":
        raise NotReadyError(job.id, job.status)
    path = await _video_file(gateway, job)
    if variant == VIDEO:
        stamp = formatdate((job.part.ended_ns or 0) // 10**9, usegmt=True)
        headers = {**_SAFE, "etag": f'"{job.id}"', "last-modified": stamp}
        return _RemovedFileResponse(path, media_type="video/mp4", headers=headers)
    try:
        make = pictures.thumbnail if variant == "thumbnail" else pictures.spritesheet
        data = await asyncio.to_thread(make, path)
    finally:
        path.unlink()
    kind = "image/webp" if variant == "thumbnail" else "image/jpeg"
    return Response(data, media_type=kind, headers=_SAFE)


async def _video_file(gateway: Gateway, job: VideoJob) -> Path:
    """Write a job's video from the log into a new file."""
    values = ValueAssembler("raw")
    try:
        video = await _read(gateway, job, values)
        return await asyncio.to_thread(_written, values.blocks(video))
    finally:
        values.close()


async def _read(gateway: Gateway, job: VideoJob, values: ValueAssembler) -> OutputValue:
    """Read a job's output; its last video is in `values`."""
    log = gateway.log
    relay = Relay(log, gateway.subjects, job.id)
    relay.output.submission_seq = job.part.seq
    relay.reread(max(1, (await log.state()).first_seq), epoch=0)
    video: OutputValue | None = None
    async with aclosing(relay.items()) as items:
        async for item in items:
            if isinstance(item, Failed):
                raise _FailedError(item.failure)
            if isinstance(item, OutputChunk) and item.modality == VIDEO and not item.advisory:
                video = values.push(item) or video
    if video is None:
        raise NoContentError(f"the job {job.id!r} ended without a video")
    return video


class _FailedError(ClientError):
    """The output on the log does not match its end, or has expired meanwhile."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message, code=failure.code, status=failure.status)


def _written(blocks: Iterable[bytes]) -> Path:
    with tempfile.NamedTemporaryFile(suffix=".mp4", delete=False) as file:
        try:
            file.writelines(blocks)
        except BaseException:
            Path(file.name).unlink()
            raise
        return Path(file.name)
