"""Small files of every format, drawn and encoded by seed-free code: the same bytes in every run."""

import io
import struct
import zlib
from fractions import Fraction
from functools import cache
from typing import Any

import av
import numpy as np
import numpy.typing as npt
from PIL import Image

IMAGES = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")
"""Pillow's name of each format."""
VIDEOS = {"mp4": "libx264", "mov": "mpeg4", "webm": "libvpx", "matroska": "libx264", "gif": "gif"}
"""FFmpeg's name of each container, and a codec."""
AUDIO = {"wav": "pcm_s16le", "flac": "flac", "mp3": "libmp3lame", "ogg": "libopus", "ipod": "aac"}
"""FFmpeg's name of each container, and a codec."""


def picture(width: int = 48, height: int = 32, shift: int = 0) -> npt.NDArray[np.uint8]:
    """Smooth colours, (height, width, 3), that differ in every corner."""
    down, right = np.mgrid[0:height, 0:width]
    red, green = right * 255 // max(width - 1, 1), down * 255 // max(height - 1, 1)
    return np.stack([red, green, np.full_like(red, 40 + 10 * shift)], axis=-1).astype(np.uint8)


def image(kind: str, pixels: npt.NDArray[Any] | None = None, **options: Any) -> bytes:
    """An image file."""
    file = io.BytesIO()
    drawn = Image.fromarray(picture() if pixels is None else pixels)
    drawn.save(file, format=kind, **{"lossless": True, "quality": 95} | options)
    return file.getvalue()


def animation(kind: str, frames: int = 5, first_ms: int = 100) -> bytes:
    """An animated GIF, WebP or PNG: a first frame, and one every 100 ms."""
    drawn = [Image.fromarray(picture(shift=n)) for n in range(frames)]
    file = io.BytesIO()
    drawn[0].save(
        file, format=kind, save_all=True, append_images=drawn[1:], duration=[first_ms, *[100] * (frames - 1)]
    )
    return file.getvalue()


@cache
def video(container: str = "mp4", *, frames: int = 12, size: tuple[int, int] = (48, 32)) -> bytes:
    """A video of ten frames per second, of (width, height); frame n has the blue of `picture(shift=n)`."""
    file, (width, height) = io.BytesIO(), size
    with av.open(file, "w", format=container) as out:
        stream = out.add_stream(VIDEOS[container], rate=10)
        assert isinstance(stream, av.VideoStream)
        stream.width, stream.height = width, height
        stream.pix_fmt = "rgb8" if container == "gif" else "yuv420p"
        stream.bit_rate = 4_000_000
        stream.codec_context.thread_count = 1
        for n in range(frames):
            out.mux(stream.encode(av.VideoFrame.from_ndarray(picture(width, height, n), format="rgb24")))
        out.mux(stream.encode(None))
    return file.getvalue()


@cache
def audio(container: str = "wav", *, seconds: float = 0.5, rate: int = 48_000, hertz: float = 440.0) -> bytes:
    """A sine in two equal channels."""
    file = io.BytesIO()
    wave = (np.sin(2 * np.pi * hertz * np.arange(int(seconds * rate)) / rate) * 16_000).astype(np.int16)
    with av.open(file, "w", format=container) as out:
        stream = out.add_stream(AUDIO[container], rate=rate, layout="stereo")
        assert isinstance(stream, av.AudioStream)
        frame = av.AudioFrame.from_ndarray(np.repeat(wave, 2)[None], format="s16", layout="stereo")
        frame.rate, frame.pts, frame.time_base = rate, 0, Fraction(1, rate)
        resampler = av.AudioResampler(stream.format, "stereo", rate, stream.frame_size or None)
        for part in [*resampler.resample(frame), *resampler.resample(None)]:
            out.mux(stream.encode(part))
        out.mux(stream.encode(None))
    return file.getvalue()


def png_header(width: int, height: int) -> bytes:
    """A PNG of that size in grey, with pixels for a few rows at most."""
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    parts = [(b"IHDR", head), (b"IDAT", zlib.compress(bytes(1_000_000))), (b"IEND", b"")]
    chunks = [struct.pack(">I", len(data)) + kind + data + _crc(kind + data) for kind, data in parts]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def gif_of_pixels(frames: int) -> bytes:
    """A GIF of one pixel, with any number of frames, ten milliseconds each."""
    screen = b"GIF89a" + struct.pack("<HHBBB", 1, 1, 0x80, 0, 0) + bytes(6)
    frame = (
        bytes.fromhex("21f9040001000000")
        + b"\x2c"
        + struct.pack("<HHHHB", 0, 0, 1, 1, 0)
        + b"\x02\x02\x44\x01\x00"
    )
    return screen + frame * frames + b";"


def _crc(data: bytes) -> bytes:
    return struct.pack(">I", zlib.crc32(data))
