"""The CPU nodes of models that tell no times: the file, its windows, and the transcript of tokens.

A family says how long its windows are, what the encoder takes, and which tokens are around a text.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from models.base import CpuResult, MediaReader, TextlessProcessing
from models.media.kinds import MediaError
from models.speech_to_text.mel import RATE
from models.speech_to_text.node_io import array_of, inline, medium_of
from models.speech_to_text.pauses import Levels
from models.speech_to_text.transcript import TRANSCRIPT, Segment, Transcript, compression_ratio
from models.speech_to_text.windows import HEARD, Heard, WindowOptions
from shared.errors import BugError
from shared.tensors import Handle

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

SHORTEST_S: Final = 0.1
"""The shortest file that has a word, as published with Moonshine."""
_WITHOUT_SPACES: Final = re.compile("[\u2e80-\uabff\uf900-\uffef]")
"""The scripts of China and Japan, which have no spaces between words."""


class Listening(msgspec.Struct, frozen=True, kw_only=True):
    """How a request listens.

    Attributes:
        longest: the most samples of a window.
        search: the last samples of a window, among which its end is searched.
        before: the tokens in front of every text.
    """

    longest: int
    search: int
    before: list[int]


class Spoken(msgspec.Struct, frozen=True, kw_only=True):
    """The text of a window, and its language by code and by name: empty if the model does not tell."""

    text: str
    language: str = ""
    language_name: str = ""


class WindowProcessing(TextlessProcessing, ABC):
    """The CPU nodes of one checkpoint.

    Args:
        tokenizer: `tokenizers.Tokenizer`.
        ends: the tokens that end a text.
        options_type: of the family.
        media: reads the file.
    """

    def __init__(
        self, tokenizer: Any, ends: Collection[int], options_type: type[WindowOptions], media: MediaReader
    ) -> None:
        self._tokenizer, self._ends, self._options_type, self._media = tokenizer, ends, options_type, media

    @abstractmethod
    def listening(self, options: Any) -> Listening:
        """How a request with these options listens.

        Raises:
            ClientError: the model cannot do what they ask for.
        """

    @abstractmethod
    def most_tokens(self, options: Any, samples: int) -> int:
        """The most tokens of a window of so many samples, those in front included."""

    @abstractmethod
    def heard(self, sound: "npt.NDArray[np.float32]") -> "npt.NDArray[np.float32]":
        """What the encoder takes, of the samples of a window."""

    def language(self, options: Any) -> tuple[str, str]:
        """The code and the English name of the spoken language; empty if the model does not tell."""
        return "", ""

    def spoken(self, options: Any, tokens: list[int]) -> Spoken:
        """What the tokens of a window say."""
        code, name = self.language(options)
        text = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return Spoken(text=text, language=code, language_name=name)

    def run(self, node: str, key: str, inputs: Mapping[str, Handle], args: Mapping[str, Any]) -> CpuResult:
        match node:
            case "listen":
                return self._listen(key, args)
            case "window":
                sound = self._media.audio_span(
                    medium_of(args), rate=RATE, first=args["first"], count=args["count"]
                )
                return CpuResult(outputs={HEARD: self.heard(sound)})
            case "transcript":
                return self._transcript(key, inputs, args)
            case "reader":
                found = msgspec.json.decode(inputs[TRANSCRIPT].data or b"", type=Transcript)
                facts = {"segments": len(found.segments), "tokens": found.tokens}
                return CpuResult(facts=facts, outputs={"read": inline(f"{key}/read", b"")})
            case _:
                raise BugError(f"expected a CPU node of speech to text, found {node!r}")

    def _listen(self, key: str, args: Mapping[str, Any]) -> CpuResult:
        """Check the options, then read the file through: its length, its pauses, damage."""
        options = msgspec.convert(args["options"], self._options_type)
        listening, levels = self.listening(options), Levels()
        self._media.audio_blocks(medium_of(args), rate=RATE, take=levels.add)
        if levels.samples < SHORTEST_S * RATE:
            error = MediaError(
                f"expected a file with at least {SHORTEST_S} s of sound, found {levels.samples / RATE:.3f} s"
            )
            error.digest = medium_of(args).digest
            raise error
        windows = levels.windows(listening.longest, listening.search)
        quiet = options.silence_threshold
        heard = Heard(
            samples=levels.samples,
            before=listening.before,
            starts=[window.first for window in windows],
            most=[self.most_tokens(options, window.count) for window in windows],
            silent=[quiet is not None and window.loudest < quiet for window in windows],
        )
        return CpuResult(facts=msgspec.to_builtins(heard), outputs={"file": inline(f"{key}/file", b"")})

    def _transcript(self, key: str, inputs: Mapping[str, Handle], args: Mapping[str, Any]) -> CpuResult:
        first, stop, total = args["first"], args["first"] + args["count"], args["samples"]
        tokens, logprobs = (array_of(inputs[name]).tolist() for name in ("tokens", "logprobs"))
        tokens = [token for token in tokens if token not in self._ends]
        spoken = self.spoken(msgspec.convert(args["options"], self._options_type), tokens)
        text = _joined(spoken.text.strip(), is_first=not args["segments"])
        segment = Segment(
            id=args["segments"],
            seek=first * 100 // RATE,
            start=round(first / RATE, 2),
            end=round(stop / RATE, 2),
            text=text,
            tokens=tokens,
            temperature=args["temperature"],
            avg_logprob=sum(logprobs) / max(len(logprobs), 1),
            compression_ratio=compression_ratio(text),
        )
        found = Transcript(
            language=spoken.language,
            language_name=spoken.language_name,
            duration=total / RATE,
            seek=first * 100 // RATE,
            next_seek=stop * 100 // RATE,
            tokens=len(tokens),
            text=text,
            segments=[segment] if text else [],
            final=stop >= total,
        )
        outputs = {"text": text.encode(), TRANSCRIPT: found.encoded()}
        return CpuResult(outputs={name: inline(f"{key}/{name}", data) for name, data in outputs.items()})


def _joined(text: str, *, is_first: bool) -> str:
    """A text as it follows another one: it begins with a space, in scripts that have them."""
    return text if is_first or not text or _WITHOUT_SPACES.match(text) else f" {text}"
