"""Encoders of images and videos: arrays to the bytes of a file. For the CPU nodes of families.

A CPU node that encodes what a model has drawn writes a fraction of the bytes to the log:

    pixels = ...                                    # (height, width, 3)
    return CpuResult(outputs={"image": encode_image(pixels, "png")})

The result is an array of bytes, as outputs are. The worker recognises the type of the file and tells the
client (`content_type`). Its edge to the client says `on_resume="keep"`, unless the pixels are exact.
"""

import io
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final, Literal, TypeAlias

import av
import numpy as np
import numpy.typing as npt
from av.audio.stream import AudioStream
from av.container import OutputContainer
from av.video.stream import VideoStream
from PIL import Image

Pixels: TypeAlias = npt.NDArray[Any]
FileBytes: TypeAlias = npt.NDArray[np.uint8]
"""The bytes of a file, (size,)."""
ImageFormat: TypeAlias = Literal["png", "jpeg", "webp"]
IMAGE_FORMATS: Final = ("png", "jpeg", "webp")
_GREY, _RGB, _RGBA = 1, 3, 4
_LAYOUTS: Final = ("mono", "stereo")
_AAC_RATES: Final = (
    7350, 8000, 11_025, 12_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000, 64_000, 88_200, 96_000,
)  # fmt: skip


def encode_image(pixels: Pixels, form: ImageFormat = "png", *, quality: int = 90) -> FileBytes:
    """Return an image file.

    Args:
        pixels: (height, width), or (height, width, 1, 3 or 4): uint8, or floats, clipped to 0 to 1.
        form: PNG is exact. JPEG has no transparency.
        quality: of JPEG and WebP, from 1 to 100.

    Raises:
        ValueError: the shape, the dtype or the format is another one.
    """
    if form not in IMAGE_FORMATS:
        raise ValueError(f"expected one of the formats {', '.join(IMAGE_FORMATS)}, found {form!r}")
    cells = _as_bytes(pixels)
    if cells.ndim == 3 and cells.shape[2] == _GREY:
        cells = cells[:, :, 0]
    if cells.ndim != 2 and not (cells.ndim == 3 and cells.shape[2] in (_RGB, _RGBA)):
        raise ValueError(
            f"expected pixels (height, width) or (height, width, 1, 3 or 4), found {pixels.shape}"
        )
    if form == "jpeg" and cells.ndim == 3 and cells.shape[2] == _RGBA:
        raise ValueError("expected pixels without transparency, (height, width, 3), for JPEG; found RGBA")
    out = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(cells)).save(out, form.upper(), quality=quality)
    return np.frombuffer(out.getvalue(), np.uint8)


@dataclass(frozen=True, slots=True, eq=False)
class Sound:
    """The sound of a video: samples from -1 to 1, (1 or 2 channels, samples), so many of them per second.

    A rate that AAC does not have is converted to the next higher one that it has.
    """

    samples: npt.NDArray[Any]
    rate: int


def encode_video(frames: Pixels, fps: float, *, quality: int = 23, sound: Sound | None = None) -> FileBytes:
    """Return an MP4 file (H.264, and AAC for the sound), which players and browsers read.

    Args:
        frames: (frames, height, width, 3): uint8, or floats from 0 to 1. An odd height or width is enlarged
            by a copy of the last row or column, because H.264 has even ones.
        fps: frames per second, above 0.
        quality: H.264's constant rate factor, from 0 (exact, large) to 51.
        sound: its sound track; None for a silent video.

    Raises:
        ValueError: the shape or dtype is another one, there is no frame, or `fps` is not above 0.
    """
    if frames.ndim != 4 or frames.shape[3] != _RGB or not frames.size:
        raise ValueError(f"expected frames (frames, height, width, 3), found {frames.shape}")
    if not fps > 0:
        raise ValueError(f"expected frames per second above 0, found {fps}")
    height, width = frames.shape[1] + frames.shape[1] % 2, frames.shape[2] + frames.shape[2] % 2
    out = io.BytesIO()
    with av.open(out, "w", format="mp4", options={"fflags": "+bitexact"}) as file:
        stream = file.add_stream("libx264", rate=Fraction(fps).limit_denominator(1001 * 120))
        assert isinstance(stream, VideoStream)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.options = {"crf": str(quality)}
        track = _add_track(file, sound) if sound is not None else None
        for frame in frames:
            padding = ((0, height - frame.shape[0]), (0, width - frame.shape[1]), (0, 0))
            cells = np.pad(_as_bytes(frame), padding, mode="edge")
            file.mux(stream.encode(av.VideoFrame.from_ndarray(cells, format="rgb24")))
        file.mux(stream.encode(None))
        if track is not None and sound is not None:
            _encode_sound(file, track, sound)
    return np.frombuffer(out.getvalue(), np.uint8)


def _add_track(file: OutputContainer, sound: Sound) -> AudioStream:
    """A track of AAC; streams must be added before the first frame is written."""
    if sound.samples.ndim != 2 or not 1 <= len(sound.samples) <= len(_LAYOUTS):
        raise ValueError(f"expected sound (1 or 2 channels, samples), found {sound.samples.shape}")
    rate = next((one for one in _AAC_RATES if one >= sound.rate), _AAC_RATES[-1])
    track = file.add_stream("aac", rate=rate, layout=_LAYOUTS[len(sound.samples) - 1])
    assert isinstance(track, AudioStream)
    return track


def _encode_sound(file: OutputContainer, track: AudioStream, sound: Sound) -> None:
    samples = np.ascontiguousarray(sound.samples, dtype=np.float32)
    frame = av.AudioFrame.from_ndarray(samples, format="fltp", layout=_LAYOUTS[len(samples) - 1])
    frame.sample_rate = sound.rate
    convert = av.AudioResampler(format="fltp", layout=frame.layout, rate=track.rate)
    for part in (*convert.resample(frame), *convert.resample(None)):
        part.pts = None
        file.mux(track.encode(part))
    file.mux(track.encode(None))


def _as_bytes(pixels: Pixels) -> npt.NDArray[np.uint8]:
    if pixels.dtype == np.uint8:
        return pixels
    if not np.issubdtype(pixels.dtype, np.floating):
        raise ValueError(f"expected pixels of uint8, or floats from 0 to 1, found {pixels.dtype}")
    cells: npt.NDArray[np.uint8] = (np.nan_to_num(pixels).clip(0, 1) * 255).round().astype(np.uint8)
    return cells
