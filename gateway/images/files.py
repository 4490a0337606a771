"""Image files in answers: their size, and PNG files of previews, which are plain pixels. By FFmpeg (PyAV)."""

import io
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, Final

import av
from av.video.codeccontext import VideoCodecContext
from av.video.frame import VideoFrame

_CHANNELS: Final = 3


def form_of(content_type: str) -> str:
    """The name of an image's format, by its MIME type: `png` for `image/png`."""
    return content_type.rpartition("/")[2]


def size_of(data: bytes) -> str:
    """The size of an image file, as `WIDTHxHEIGHT`; empty if it cannot be read."""
    try:
        with av.open(io.BytesIO(data)) as file:
            stream = file.streams.video[0]
            return f"{stream.width}x{stream.height}"
    except (av.FFmpegError, IndexError):
        return ""


def shown(data: bytes, metadata: Mapping[str, Any]) -> tuple[bytes, str, str] | None:
    """An image that a client can show: the file, its format and its size.

    Args:
        data: a file, or pixels: uint8, (height, width, 3).
        metadata: of its chunk.

    Returns:
        None for anything else.
    """
    if isinstance(kind := metadata.get("content_type"), str):
        return data, form_of(kind), size_of(data)
    match metadata:
        case {"dtype": "uint8", "shape": [int(height), int(width), 3]} if (
            height * width and len(data) == height * width * _CHANNELS
        ):
            return png_of(data, width, height), "png", f"{width}x{height}"
    return None


def png_of(pixels: bytes, width: int, height: int) -> bytes:
    """A PNG file of RGB pixels, row by row."""
    frame = VideoFrame(width, height, "rgb24")
    plane, row = frame.planes[0], width * _CHANNELS
    padding = bytes(plane.line_size - row)
    rows = (pixels[start : start + row] + padding for start in range(0, height * row, row))
    plane.update(b"".join(rows))
    encoder = av.CodecContext.create("png", "w")
    assert isinstance(encoder, VideoCodecContext)
    encoder.width, encoder.height, encoder.pix_fmt = width, height, "rgb24"
    encoder.time_base = Fraction(1)
    return b"".join(bytes(packet) for packet in [*encoder.encode(frame), *encoder.encode(None)])
