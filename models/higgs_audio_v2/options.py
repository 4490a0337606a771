"""The request parameters of Higgs Audio v2. Pure: the graph imports it."""

from typing import Annotated

from msgspec import Meta, Struct

CHUNK_FRAMES = 64
"""The most frames of a chunk of audio."""


class HiggsAudioOptions(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Options of speech.

    Attributes:
        instructions: the system message.
        scene: where the speech is heard, and how its speakers sound, such as `SPEAKER0: a calm, deep voice`;
            empty for none.
        initial_codec_chunk_frames: the frames of the first chunk of audio, 25 to a second; each next one has
            twice as many, up to 64. Default: 4, or more while many requests run.
    """

    instructions: str = "Generate audio following instruction."
    scene: str = "Audio is recorded from a quiet room."
    initial_codec_chunk_frames: Annotated[int, Meta(ge=1, le=CHUNK_FRAMES)] | None = None
