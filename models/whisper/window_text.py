"""The transcript of a window, of the tokens that the decoder has written. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import msgspec
import numpy as np
import numpy.typing as npt

from models.speech_to_text.transcript import Segment, Transcript, Word
from models.whisper.alignment import token_times
from models.whisper.languages import Languages
from models.whisper.segments import STRIDE, TIME_S, Part, parts_of
from models.whisper.settings import WhisperSettings
from models.whisper.words import words_of


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WindowTokens:
    """The outputs of the program `transcribe`.

    Attributes:
        tokens: without the one that ends the text.
        logprobs: of each of them.
        attention: (heads, tokens, frames); empty without times of words.
    """

    tokens: list[int]
    logprobs: list[float]
    attention: npt.NDArray[np.float32]
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float
    temperature: float
    is_silent: bool
    language: int

    @classmethod
    def of(cls, outputs: Mapping[str, Any]) -> Self:
        """Read the outputs, as arrays by edge."""
        avg, ratio, no_speech, temperature, silent, language = outputs["figures"].tolist()
        return cls(
            tokens=outputs["tokens"].tolist(),
            logprobs=outputs["logprobs"].tolist(),
            attention=outputs["attention"],
            avg_logprob=avg,
            compression_ratio=ratio,
            no_speech_prob=no_speech,
            temperature=temperature,
            is_silent=bool(silent),
            language=int(language),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WindowText:
    """Makes the transcript of one window.

    Attributes:
        tokenizer: of the checkpoint (`tokenizers.Tokenizer`).
        seek: the first mel frame of the window.
        frames: the mel frames of the window.
        sounding: those of them that are of the file, not of silence behind it.
        first_segment: the number of segments before the window.
    """

    settings: WhisperSettings
    tokenizer: Any
    languages: Languages
    tokens: WindowTokens
    seek: int
    frames: int
    sounding: int
    first_segment: int

    def transcript(self, *, duration: float, total: int, has_times: bool, has_words: bool) -> Transcript:
        """The transcript.

        Args:
            duration: of the file, in seconds.
            total: the mel frames that windows are taken of.
            has_times: the tokens have times.
            has_words: times of words are wanted.
        """
        parts, moved = self._parts()
        following = self.seek + moved
        code = self.settings.language_of(self.tokens.language)
        times = self._times() if has_words and parts else None
        if not has_times:
            # Nothing keeps the model from writing times in any order; and a window is as long as its sound.
            parts = [part.within(self.seek * TIME_S / STRIDE, duration) for part in parts]
        segments = [self._segment(number, part, code, times) for number, part in enumerate(parts)]
        return Transcript(
            language=code or ("" if self.settings.languages else "en"),
            language_name=self.languages.name_of(code or "en"),
            duration=duration,
            seek=self.seek,
            next_seek=following,
            tokens=len(self.tokens.tokens),
            text="".join(segment.text for segment in segments),
            segments=segments,
            final=following >= total,
        )

    def _parts(self) -> tuple[list[Part], int]:
        if self.tokens.is_silent:
            return [], self.frames
        return parts_of(
            self.tokens.tokens, first_time=self.settings.first_time, seek=self.seek, frames=self.frames
        )

    def _times(self) -> list[float]:
        """The seconds of each token, from the beginning of the window."""
        if not self.tokens.attention.size:
            return [0.0] * len(self.tokens.tokens)
        return token_times(
            self.tokens.attention, frames=self.sounding // STRIDE, width=self.settings.median_width
        )

    def _segment(self, number: int, part: Part, code: str, times: list[float] | None) -> Segment:
        tokens = self.tokens.tokens[part.first : part.stop]
        return Segment(
            id=self.first_segment + number,
            seek=self.seek,
            start=round(part.start, 2),
            end=round(part.end, 2),
            text=self.text_of(tokens),
            tokens=tokens,
            temperature=self.tokens.temperature,
            avg_logprob=self.tokens.avg_logprob,
            compression_ratio=self.tokens.compression_ratio,
            no_speech_prob=self.tokens.no_speech_prob,
            words=msgspec.UNSET if times is None else self._words(part, code, times),
        )

    def _words(self, part: Part, code: str, times: list[float]) -> list[Word]:
        return words_of(
            self.tokenizer,
            self.tokens.tokens,
            places=range(part.first, part.stop),
            times=times,
            logprobs=self.tokens.logprobs,
            end=self.settings.end,
            first_time=self.settings.first_time,
            language=self.languages.name_of(code),
            offset=self.seek * TIME_S / STRIDE,
        )

    def text_of(self, tokens: list[int]) -> str:
        """The text of tokens, without times and special tokens."""
        text: str = self.tokenizer.decode(text_tokens(tokens, self.settings), skip_special_tokens=True)
        return text


def text_tokens(tokens: list[int], settings: WhisperSettings) -> list[int]:
    """The tokens that are text."""
    return [token for token in tokens if token < min(settings.first_time, settings.end)]
