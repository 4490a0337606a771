"""Video jobs as OpenAI shows them. Pure.

A job is a request on the log for a video, whatever route it came by. Until the video is complete, a job
states the size and length that were asked for; a value that the model chooses is empty until then.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from gateway.requests.relay import REQUEST_CANCELLED
from gateway.requests.status import PartStatus
from gateway.videos.request import VIDEO
from shared.events import Failure, RequestSubmitted

_NS: Final = 1_000_000_000
_STATUS: Final = {
    "waiting": "queued",
    "running": "in_progress",
    "cancelling": "in_progress",
    "finished": "completed",
    "cancelled": "failed",
    "failed": "failed",
    "rejected": "failed",
}
_CANCELLED: Final = Failure(code=REQUEST_CANCELLED, message="the job was cancelled", status=410)


def is_job(event: RequestSubmitted, tenant: str | None) -> bool:
    """Return whether a request is a video job of a tenant."""
    asks_for_video = event.inputs.output_modalities == [VIDEO] and not event.params.warm
    return asks_for_video and event.tenant == tenant


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoJob:
    """A job.

    Attributes:
        part: its status.
        event: its submission.
        progress: the newest progress that was reported, such as `{"step": 3, "steps": 50}`.
        video: the metadata of the complete video: `width`, `height`, `frames`, `fps`.
    """

    part: PartStatus
    event: RequestSubmitted
    progress: Mapping[str, Any] = field(default_factory=dict)
    video: Mapping[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return self.part.id

    @property
    def status(self) -> str:
        """OpenAI's word for the status; a job that was cancelled has failed."""
        return _STATUS[self.part.status]

    @property
    def failure(self) -> Failure | None:
        """The reason of a job that failed."""
        return _CANCELLED if self.part.status == "cancelled" else self.part.failure

    def document(self, log_max_age_s: float | None) -> dict[str, Any]:
        """The job object; its content expires when its events leave the log, at this age."""
        created_s = self.event.created_s or self.part.submitted_ns // _NS
        ended_ns, failure = self.part.ended_ns, self.failure
        expires_ns = None if log_max_age_s is None else self.part.submitted_ns + int(log_max_age_s * _NS)
        is_complete = self.status == "completed"
        return {
            "id": self.id,
            "object": "video",
            "model": self.event.model,
            "status": self.status,
            "progress": self._percent(),
            "created_at": created_s,
            "completed_at": ended_ns // _NS if ended_ns is not None and is_complete else None,
            "expires_at": None if expires_ns is None else expires_ns // _NS,
            "prompt": self.event.inputs.text,
            "size": self._size(),
            "seconds": self._seconds(),
            "remixed_from_video_id": None,
            "error": None if failure is None else {"code": failure.code, "message": failure.message},
        }

    def _percent(self) -> int:
        """The part of the steps that are done, of 100, which only a complete job has."""
        if self.status == "completed":
            return 100
        match self.progress:
            case {"step": int(step), "steps": int(steps)} if steps > 0:
                return max(0, min(99, 100 * step // steps))
            case _:
                return 0

    def _size(self) -> str:
        for found in (self.video, self.event.params.options):
            match found:
                case {"width": int(width), "height": int(height)}:
                    return f"{width}x{height}"
                case _:
                    pass
        return ""

    def _seconds(self) -> str:
        options = self.event.params.options
        asked = {"frames": options.get("num_frames"), "fps": options.get("fps")}
        for found in (self.video, options, asked):
            match found:
                case {"frames": int(frames), "fps": int() | float() as fps} if fps > 0:
                    return f"{frames / fps:.6g}"
                case {"seconds": int() | float() as seconds}:
                    return f"{seconds:.6g}"
                case _:
                    pass
        return ""
