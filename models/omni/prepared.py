"""Facts and arguments of the walks of models that think and talk, and the sampling of the talker. Pure."""

from collections.abc import Sequence
from typing import Final

import msgspec

from models.omni.options import OmniOptions
from models.sequence_request import PromptPart, SamplingParams, SequenceRequest
from models.vision_language.visuals import MediaSequenceRequest, PreparedMedia, Visual

AUDIO: Final = "audio"
SAMPLE_RATE: Final = 24_000
TURN_TOKENS: Final = 3
"""The last tokens of a chat: the begin of the assistant's turn."""


class Speech(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Facts about the talker's prompt.

    Attributes:
        voice: its name.
        speaker: the voice's own token.
        end_codes: the codes that end speech.
        spans: half-open ranges of the thinker's prompt: the talker hears these alone.
        prompt_tokens: the number of tokens of the talker's prompt.
        parts: its media, for positions of several axes.
        penalized_ids: the codes that a penalty for repetition counts as said.
    """

    voice: str
    speaker: int
    end_codes: Sequence[int]
    spans: Sequence[tuple[int, int]]
    prompt_tokens: int
    parts: Sequence[PromptPart] = ()
    penalized_ids: Sequence[int] = ()


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
