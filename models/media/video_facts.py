"""The facts of an encoded video, read from its header. For chunks that tell a client what it gets."""

import io
from typing import Any

import av


def video_facts(data: bytes) -> dict[str, Any]:
    """What a video is: `codec`, `width`, `height`, `fps` and `frames`, and `audio_codec` if it has sound.

    Empty for bytes that are no video. Nothing is decoded.
    """
    try:
        with av.open(io.BytesIO(data), "r") as file:
            if not file.streams.video:
                return {}
            stream = file.streams.video[0]
            facts: dict[str, Any] = {
                "codec": stream.codec_context.name,
                "width": stream.codec_context.width,
                "height": stream.codec_context.height,
                "frames": stream.frames,
            }
            if stream.average_rate:
                facts["fps"] = _plain(float(stream.average_rate))
            if file.streams.audio:
                facts["audio_codec"] = file.streams.audio[0].codec_context.name
            return facts
    except av.FFmpegError:
        return {}


def _plain(fps: float) -> float:
    return int(fps) if fps == int(fps) else fps
