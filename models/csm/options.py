"""The request parameters of CSM, under transformers' names. Pure: the graph imports it."""

from typing import Annotated

from msgspec import Meta, Struct


class CsmOptions(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Options of speech.

    Attributes:
        depth_decoder_temperature: of the codes of a frame after the first. Default: that of the first.
        depth_decoder_top_k: the likeliest of these codes to choose from; 0 is all.
        initial_codec_chunk_frames: the frames of 80 ms of the first chunk of audio; each next one has twice
            as many, up to 25. Default: 4, or more while many requests run.
    """

    depth_decoder_temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    depth_decoder_top_k: Annotated[int, Meta(ge=0)] = 50
    initial_codec_chunk_frames: Annotated[int, Meta(ge=1, le=25)] | None = None
