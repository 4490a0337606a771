"""The request parameters of Qwen3-TTS, under the names of its package. Pure: the graph imports it."""

from typing import Annotated, ClassVar

from msgspec import Meta, Struct

Temperature = Annotated[float, Meta(ge=0, le=2)]


class Qwen3TtsOptions(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Options of speech.

    Attributes:
        speaker: the voice, if the request has no `voice`.
        language: the language of the text, such as `english`; `auto` lets the model find it.
        instructions: how to speak, in words. Checkpoints of 0.6B do not follow them.
        do_sample: false takes the likeliest first code of each frame, whatever the temperature.
        talker_temperature: of the first code of each frame, if the request has no `temperature`.
        subtalker_dosample: false takes the likeliest other codes. Default: as for the first codes.
        subtalker_temperature: of the other codes of each frame. Default: the checkpoint's, or else 0.9.
        subtalker_top_k: the likeliest other codes to choose from; 0 is all. Default: the checkpoint's, or
            else 50.
        subtalker_top_p: the share of the probability of other codes to choose from.
        initial_codec_chunk_frames: the frames of 80 ms of the first chunk of audio; each next one has twice
            as many, up to 300. Default: 4, or more while many requests run.
    """

    OTHER_NAMES: ClassVar = {"instruct": "instructions"}

    speaker: str | None = None
    language: str = "auto"
    instructions: str | None = None
    do_sample: bool | None = None
    talker_temperature: Temperature | None = None
    subtalker_dosample: bool | None = None
    subtalker_temperature: Temperature | None = None
    subtalker_top_k: Annotated[int, Meta(ge=0)] | None = None
    subtalker_top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    initial_codec_chunk_frames: Annotated[int, Meta(ge=1, le=300)] | None = None
