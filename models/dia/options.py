"""The request parameters of Dia, under transformers' names. Pure: the graph imports it."""

from typing import Annotated

from msgspec import Meta, Struct

CHUNK_FRAMES = 128
"""The most frames of a chunk of audio: 1.5 s."""


class DiaOptions(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Options of speech.

    Attributes:
        guidance_scale: how far the codes follow the text rather than no text (classifier-free guidance); 1 is
            no guidance, and half of the work. Default: the checkpoint's.
        initial_codec_chunk_frames: the frames of the first chunk of audio, 86 to a second; each next one has
            twice as many, up to 128. Default: 16, or more while many requests run.
    """

    guidance_scale: Annotated[float, Meta(ge=1, le=100)] | None = None
    initial_codec_chunk_frames: Annotated[int, Meta(ge=1, le=CHUNK_FRAMES)] | None = None
