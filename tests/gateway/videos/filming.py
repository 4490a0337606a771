"""A scripted model that films, for tests of the video routes."""

import io
from fractions import Fraction
from functools import cache
from typing import Annotated, Any, ClassVar, Final

import av
import msgspec
import numpy as np
from msgspec import Meta

from gateway.served_model import ServedModel
from shared.events import NodeReady, encode
from shared.output_pieces import piece_spans
from shared.subjects import CONDUCTOR_WRITER
from tests.gateway.world import Performance

WIDTH, HEIGHT, FRAMES, FPS = 64, 48, 9, 8


class FilmOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A film.

    Attributes:
        width: pixels.
        height: pixels.
        seconds: the length.
        num_frames: the number of frames.
        fps: frames a second.
        num_inference_steps: the steps.
        guidance_scale: the guidance.
        frames: give the frames as images.
        strength: how much of an image may change.
    """

    OTHER_NAMES: ClassVar = {"steps": "num_inference_steps"}

    width: Annotated[int, Meta(ge=16, multiple_of=16)] | None = None
    height: Annotated[int, Meta(ge=16, multiple_of=16)] | None = None
    seconds: Annotated[float, Meta(gt=0, le=20)] | None = None
    num_frames: Annotated[int, Meta(ge=1)] | None = None
    fps: Annotated[float, Meta(gt=0)] | None = None
    num_inference_steps: Annotated[int, Meta(ge=1, le=100)] = 50
    guidance_scale: float = 5.0
    frames: bool = False
    strength: Annotated[float, Meta(ge=0, le=1)] = 0.8


DIRECTOR: Final = ServedModel(
    name="demo",
    family="decoder_lm",
    ranks=(0,),
    max_seq_len=512,
    modalities=("text", "image"),
    outputs=("video",),
    options=FilmOptions,
)


@cache
def film() -> bytes:
    """An MP4 file with random frames."""
    target = io.BytesIO()
    noise = np.random.default_rng(0)
    with av.open(target, "w", format="mp4") as file:
        stream = file.add_stream("libx264", rate=Fraction(FPS))
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        for _ in range(FRAMES):
            pixels = noise.integers(0, 256, (HEIGHT, WIDTH, 3), np.uint8)
            file.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, "rgb24")))
        file.mux(stream.encode(None))
    return target.getvalue()


def accept(performance: Performance) -> None:
    """Order the second step, as a conductor does when the first one has taken the request."""
    order = NodeReady(
        writer=CONDUCTOR_WRITER, epoch=1, rank=0, index=1, model="demo", walks=[], placement={}, origin="g",
        seed=0, reason="", history=b"",
    )  # fmt: skip
    performance.server.append(performance.subjects.ready(0, performance.request_id), encode(order))


def advise(performance: Performance, step: int, steps: int = 4) -> None:
    """Report a step, and store a checkpoint of it in 3 pieces. The first one shows that it was ordered."""
    if step == 1:
        accept(performance)
    report = {"step": step, "steps": steps, "steps_per_s": 2.0, "remaining_s": (steps - step) / 2}
    performance.value("progress", b"", {"node": "denoiser", "progress": report}, advisory=True)
    for piece, start, stop in piece_spans("denoiser", 3000, 1000):
        performance.value("checkpoint", bytes(stop - start), piece.metadata, advisory=True)


def put_film(performance: Performance, data: bytes | None = None, pieces: int = 99) -> None:
    """Put a film into the log, in pieces of 2000 bytes."""
    data = film() if data is None else data
    about: dict[str, Any] = {
        "dtype": "uint8", "shape": [len(data)], "content_type": "video/mp4", "codec": "h264",
        "width": WIDTH, "height": HEIGHT, "frames": FRAMES, "fps": FPS,
    }  # fmt: skip
    for piece, start, stop in piece_spans("encode_output.video", len(data), 2000)[:pieces]:
        performance.value("video", data[start:stop], about | piece.metadata)


async def shoot(performance: Performance) -> None:
    """Film, the second time to the end: the first attempt dies after a piece."""
    for step in (1, 2, 3, 4):
        advise(performance, step)
    put_film(performance, film()[::-1], pieces=1)
    put_film(performance)
    performance.finish()
