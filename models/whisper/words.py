"""Words of a segment, with times and probabilities. Transformers' rules decide which tokens are a word."""

import math
from collections.abc import Sequence
from typing import Any, Final

from models.speech_to_text.transcript import Word


class _Tokenizer:
    """A tokenizer as the rules of words call it."""

    def __init__(self, tokenizer: Any, end: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id: Final = end
        self.language = None

    def decode(self, ids: list[int], **_: Any) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text


def words_of(
    tokenizer: Any,
    tokens: Sequence[int],
    *,
    places: range,
    times: Sequence[float],
    logprobs: Sequence[float],
    end: int,
    first_time: int,
    language: str,
    offset: float,
) -> list[Word]:
    """The words of a segment.

    Args:
        tokenizer: of the checkpoint (`tokenizers.Tokenizer`).
        tokens: all of the window.
        places: those of the segment.
        times: of each token of the window, in seconds from its beginning.
        logprobs: of each token of the window.
        end: the token that ends a text; those from it on are no text.
        first_time: the first token that is a time.
        language: its English name.
        offset: the beginning of the window, in seconds.
    """
    from transformers.models.whisper.tokenization_whisper import (  # noqa: PLC0415 - heavy: it imports torch
        _combine_tokens_into_words,
    )

    spoken = [place for place in places if tokens[place] < min(end, first_time)]
    if not spoken:
        return []
    texts, _, groups = _combine_tokens_into_words(
        _Tokenizer(tokenizer, end), [tokens[place] for place in spoken], language or "english"
    )
    found = []
    for text, group in zip(texts, groups, strict=True):
        first, last = spoken[group[0]], spoken[group[-1]]
        chances = [math.exp(logprobs[spoken[index]]) for index in group]
        found.append(
            Word(
                word=text,
                start=round(offset + (times[first - 1] if first else 0.0), 2),
                end=round(offset + times[last], 2),
                probability=sum(chances) / len(chances),
            )
        )
    return found
