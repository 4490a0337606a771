"""Request parameters of speech to text. No torch."""

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from shared.errors import ClientError

TEMPERATURE_STEP: Final = 0.2
"""The difference of temperatures of two attempts at a window, as published with Whisper."""

Granularity = Literal["segment", "word"]


class SpeechOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Options of a transcription. `temperature` of the request is the one of the first attempt.

    Attributes:
        task: `transcribe` in the language that is spoken, or `translate` into English.
        language: the spoken language, as a code such as `de` or a name such as `german`. Default: it is
            detected in the first window.
        prompt: a text that is to precede the speech: names, spelling, style.
        timestamps: `segment` has the model write times, `word` computes the time of each word, too. A file
            that is longer than a window has times of segments in any case.
        no_speech_threshold: a window is silent if the probability of no speech is above it, and the mean log
            probability below `logprob_threshold`. Null: never.
        compression_ratio_threshold: a text that zlib compresses by more than this repeats itself, and is
            tried again at a higher temperature. Null: it is kept.
        logprob_threshold: a text with a lower mean log probability is tried again at a higher temperature.
            Null: it is kept.
    """

    task: Literal["transcribe", "translate"] = "transcribe"
    language: Annotated[str, Meta(max_length=64)] | None = None
    prompt: Annotated[str, Meta(max_length=65_536)] = ""
    timestamps: Annotated[list[Granularity], Meta(max_length=2)] = []
    no_speech_threshold: Annotated[float, Meta(ge=0, le=1)] | None = 0.6
    compression_ratio_threshold: Annotated[float, Meta(gt=0)] | None = 2.4
    logprob_threshold: Annotated[float, Meta(le=0)] | None = -1.0


class UnknownLanguageError(ClientError):
    """The model does not know the language that a request names, or needs one."""

    code = "unknown_language"
    param = "language"


def temperatures(first: float | None) -> list[float]:
    """The temperatures of the attempts at a window: the request's, and higher ones up to 1."""
    start = first or 0.0
    count = int(max(1.0 - start, 0.0) / TEMPERATURE_STEP + 1e-6)
    return [start, *(round(start + number * TEMPERATURE_STEP, 6) for number in range(1, count + 1))]
