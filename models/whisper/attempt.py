"""One attempt to write the text of a window: choosing tokens, and judging the result.

Transformers' own processors decide which tokens are allowed: suppressed tokens, and the rules of times.
"""

import hashlib
import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from transformers import (
    LogitsProcessorList,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    WhisperTimeStampLogitsProcessor,
)

from models.speech_to_text.options import SpeechOptions

Decode = Callable[[Sequence[int]], str]
"""The text of token ids, without times and special tokens."""


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


@dataclass(slots=True, kw_only=True, eq=False)
class Attempt:
    """The text of a window, token by token.

    Attributes:
        before: the tokens in front of it.
        temperature: 0 chooses the likeliest token.
        most: the most tokens, those in front included.
        end: the token that ends the text.
        seed: of the draws of this attempt.
        tokens: the chosen ones, with the end token.
        logprobs: the logarithm of the probability of each of them, at temperature 1.
        no_speech: the probability of no speech.
    """

    before: Sequence[int]
    processors: Any
    temperature: float
    most: int
    end: int
    seed: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    no_speech: float = 0.0
    _draw: torch.Generator = field(default_factory=torch.Generator)

    def __post_init__(self) -> None:
        self._draw.manual_seed(self.seed)

    @property
    def ids(self) -> list[int]:
        """All tokens, those in front included."""
        return [*self.before, *self.tokens]

    @property
    def is_over(self) -> bool:
        return len(self.ids) >= self.most or (bool(self.tokens) and self.tokens[-1] == self.end)

    @property
    def text_tokens(self) -> list[int]:
        """The chosen tokens without the one that ends the text."""
        return self.tokens[:-1] if self.tokens and self.tokens[-1] == self.end else self.tokens

    @property
    def avg_logprob(self) -> float:
        return sum(self.logprobs) / len(self.logprobs) if self.logprobs else -math.inf

    def take(self, logits: torch.Tensor) -> int:
        """Choose the next token by its logits, (vocab,) float32; return it."""
        ids = torch.tensor([self.ids], device=logits.device)
        scores = self.processors(ids, logits[None])[0].cpu()
        if self.temperature > 0:
            chances = torch.softmax(scores / self.temperature, dim=-1)
            token = int(torch.multinomial(chances, 1, generator=self._draw))
        else:
            token = int(scores.argmax())
        self.tokens.append(token)
        self.logprobs.append(float(torch.log_softmax(scores, dim=-1)[token]))
        return token


def compression_ratio(text: str) -> float:
    """The length of a text in UTF-8 over that of its zlib compression: large for repetitions."""
    encoded = text.encode()
    return len(encoded) / len(zlib.compress(encoded))


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


def seed_of(seed: int, seek: int, number: int) -> int:
    """The seed of an attempt's draws: 63 bits, by the request's seed and the window."""
    digest: Final = hashlib.blake2b(f"{seed}/whisper/{seek}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
