"""Pictures of a video, by FFmpeg (PyAV): its first frame, and a sheet of frames from all of it."""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, Final

import av
from av.filter import Graph
from av.video.codeccontext import VideoCodecContext
from av.video.frame import VideoFrame

_COLUMNS: Final = 4
_ROWS: Final = 4
_TILE_WIDTH: Final = 240


def thumbnail(path: Path) -> bytes:
    """The first frame as WebP."""
    with av.open(path) as video:
        frame = next(video.decode(video=0))
        return _encoded(frame, "libwebp", "yuv420p")


def spritesheet(path: Path) -> bytes:
    """Up to 16 frames at equal distances, in rows of 4, as JPEG."""
    with av.open(path) as video:
        total = sum(1 for _ in video.decode(video=0))
    kept = min(total, _COLUMNS * _ROWS)
    chosen = {number * total // kept for number in range(kept)}
    with av.open(path) as video:
        frames = [frame for number, frame in enumerate(video.decode(video=0)) if number in chosen]
    rows = -(-len(frames) // _COLUMNS)
    filters = [
        ("scale", f"{_TILE_WIDTH}:-2"),
        ("tile", f"{_COLUMNS}x{rows}"),
        ("format", "yuvj420p"),
    ]
    [sheet] = _filtered(frames, filters)
    return _encoded(sheet, "mjpeg", "yuvj420p")


def _filtered(frames: Sequence[VideoFrame], filters: Sequence[tuple[str, str]]) -> Iterator[Any]:
    """The frames that a chain of filters makes of these frames."""
    graph = Graph()
    first = frames[0]
    source = graph.add_buffer(
        width=first.width, height=first.height, format=first.format, time_base=Fraction(1, 25)
    )
    graph.link_nodes(source, *(graph.add(name, args) for name, args in filters), graph.add("buffersink"))
    graph.configure()
    for number, frame in enumerate(frames):
        frame.pts, frame.time_base = number, Fraction(1, 25)
        graph.push(frame)
    graph.push(None)
    while True:
        try:
            yield graph.pull()
        except (av.EOFError, av.BlockingIOError):
            return


def _encoded(frame: VideoFrame, codec: str, pixels: str) -> bytes:
    encoder = av.CodecContext.create(codec, "w")
    assert isinstance(encoder, VideoCodecContext)
    encoder.width, encoder.height, encoder.pix_fmt = frame.width, frame.height, pixels
    encoder.time_base = Fraction(1, 25)
    whole = frame.reformat(format=pixels)
    whole.pts = None
    return b"".join(bytes(packet) for packet in [*encoder.encode(whole), *encoder.encode(None)])
