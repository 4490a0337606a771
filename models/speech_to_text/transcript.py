"""The transcript of a window of speech: what the modality `transcript` carries, as JSON. No torch."""

import zlib
from typing import Final

import msgspec

TRANSCRIPT: Final = "transcript"
"""The modality of the transcripts of windows: one chunk each, a JSON object in UTF-8."""


class Word(msgspec.Struct, frozen=True, kw_only=True):
    """A word, with the punctuation around it.

    Attributes:
        start, end: seconds from the beginning of the file.
        probability: the mean probability of its tokens.
    """

    word: str
    start: float
    end: float
    probability: float


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the transcript. All its fields are written, `words` if it is set.

    Attributes:
        id: its number in the file, from 0.
        seek: the first frame of its window; a frame is 10 ms.
        start, end: seconds from the beginning of the file.
        tokens: its token ids, with those of its times.
        temperature: of the attempt that it is of.
        avg_logprob: the mean log probability of the tokens of its window.
        compression_ratio: the length of the window's text over that of its zlib compression.
        no_speech_prob: the probability that nobody speaks in its window.
        words: if they were asked for.
    """

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int] = []
    temperature: float = 0.0
    avg_logprob: float = 0.0
    compression_ratio: float = 0.0
    no_speech_prob: float = 0.0
    words: list[Word] | msgspec.UnsetType = msgspec.UNSET


class Transcript(msgspec.Struct, frozen=True, kw_only=True):
    """The transcript of one window.

    Attributes:
        language: the spoken language, as a code such as `de`; empty if the model does not tell.
        language_name: its English name, such as `german`; empty if the model does not tell.
        duration: of the whole file, in seconds.
        seek: the first frame of the window; a frame is 10 ms.
        next_seek: the first frame of the next window.
        tokens: the number of tokens that the model generated for the window.
        text: the texts of all segments.
        final: it is the last window.
    """

    language: str
    language_name: str
    duration: float
    seek: int
    next_seek: int
    tokens: int
    text: str
    segments: list[Segment]
    final: bool

    def encoded(self) -> bytes:
        """The JSON object, in UTF-8."""
        return msgspec.json.encode(self)


def compression_ratio(text: str) -> float:
    """The length of a text in UTF-8 over that of its zlib compression: large for repetitions."""
    encoded = text.encode()
    return len(encoded) / len(zlib.compress(encoded))
