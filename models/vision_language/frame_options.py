"""The request parameters of families that look at videos. Pure: graphs import it."""

from typing import Annotated

import msgspec
from msgspec import Meta


class FrameOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The frames to look at of each video.

    Attributes:
        fps: frames to take per second of video. Default: the checkpoint's, usually 2.
        max_frames: the most frames to take of a video. Default: the checkpoint's, usually 768.
    """

    fps: Annotated[float, Meta(gt=0, le=240)] | None = None
    max_frames: Annotated[int, Meta(ge=2, le=2048)] | None = None
