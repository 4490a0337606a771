"""Facts and arguments of the walks of Qwen3-Omni, and the sampling of its talker. Pure."""

from collections.abc import Sequence
from typing import Final

import msgspec

from models.qwen3_omni.options import OmniOptions
from models.sequence_request import PromptPart, SamplingParams, SequenceRequest
from models.vision_language.visuals import MediaSequenceRequest, PreparedMedia, Visual

AUDIO: Final = "audio"
SAMPLE_RATE: Final = 24_000
TURN_TOKENS: Final = 3
"""The last tokens of a chat: the begin of the assistant's turn."""
SPOKEN_TOKENS: Final = TURN_TOKENS + 6
"""The tokens of the talker's prompt after the user's turns; the last has the first token of the answer."""


class Speech(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Facts about the talker's prompt.

    Attributes:
        speaker: the code of the voice.
        end_code: the code that ends speech.
        spans: the user's turns in the thinker's prompt, as half-open ranges: the talker hears these alone.
        prompt_tokens: the number of tokens of the talker's prompt.
        parts: its media, for positions of several axes.
    """

    speaker: int
    end_code: int
    spans: Sequence[tuple[int, int]]
    prompt_tokens: int
    parts: Sequence[PromptPart] = ()


class PreparedOmni(PreparedMedia, frozen=True, kw_only=True, omit_defaults=True):
    """Facts that `prepare` reports to the plan.

    Attributes:
        sounds: the audio of the prompt; `visuals` are its images and videos.
        speech: for an answer that is spoken.
    """

    sounds: Sequence[Visual] = ()
    speech: Speech | None = None


class OmniSequenceRequest(MediaSequenceRequest, frozen=True, kw_only=True, omit_defaults=True):
    """Arguments of a walk that starts a sequence whose prompt has media: `sounds` are for the encoder."""

    sounds: Sequence[Visual] = ()


class TalkRequest(SequenceRequest, frozen=True, kw_only=True, omit_defaults=True):
    """Arguments of the walk that speaks; see `Speech`."""

    speaker: int
    spans: Sequence[tuple[int, int]]


def talker_sampling(options: OmniOptions) -> SamplingParams:
    """The sampling of the first code of each frame."""
    return SamplingParams(
        temperature=options.talker_temperature,
        top_k=options.talker_top_k,
        top_p=options.talker_top_p,
        repetition_penalty=options.talker_repetition_penalty,
    )


def predictor_sampling(options: OmniOptions) -> SamplingParams:
    """The sampling of the other codes of each frame."""
    temperature = options.code_predictor_temperature
    if temperature is None:
        temperature = 1.0 if options.talker_temperature else 0.0
    return SamplingParams(
        temperature=temperature, top_k=options.code_predictor_top_k, top_p=options.code_predictor_top_p
    )
