"""The rules of an attempt at a window: the tokens that are allowed, and whether its text stays.

Transformers' own processors decide which tokens are allowed: suppressed tokens, and the rules of times.
"""

from typing import Any

from transformers import (
    LogitsProcessorList,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    WhisperTimeStampLogitsProcessor,
)

from models.speech_to_text.attempt import Attempt
from models.speech_to_text.options import SpeechOptions


def processors_of(generation: Any, *, begin: int, has_times: bool) -> LogitsProcessorList:
    """The processors of logits, in the order of transformers' `WhisperForConditionalGeneration.generate`.

    Args:
        generation: the `GenerationConfig` of the checkpoint.
        begin: the number of tokens before the text.
        has_times: times are written.
    """
    found = LogitsProcessorList()
    if generation.begin_suppress_tokens is not None:
        found.append(SuppressTokensAtBeginLogitsProcessor(generation.begin_suppress_tokens, begin))
    if generation.suppress_tokens is not None:
        found.append(SuppressTokensLogitsProcessor(generation.suppress_tokens))
    if has_times:
        found.append(WhisperTimeStampLogitsProcessor(generation, begin_index=begin))
    return found


def is_silent(attempt: Attempt, options: SpeechOptions) -> bool:
    """Return whether a window has no speech: unlikely text, where silence is likely."""
    if options.no_speech_threshold is None or attempt.no_speech <= options.no_speech_threshold:
        return False
    return options.logprob_threshold is None or attempt.avg_logprob < options.logprob_threshold


def is_poor(attempt: Attempt, ratio: float, options: SpeechOptions) -> bool:
    """Return whether a text is to be tried again at a higher temperature."""
    repeats = options.compression_ratio_threshold is not None and ratio > options.compression_ratio_threshold
    unlikely = options.logprob_threshold is not None and attempt.avg_logprob < options.logprob_threshold
    return repeats or unlikely
