"""The CPU nodes of Moonshine: the file, its windows, and the transcript of a window's tokens."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from models.base import CpuResult, MediaReader, TextlessProcessing
from models.checkpoints.files import CheckpointError
from models.media.kinds import MediaError
from models.moonshine.graph import Heard, MoonshineOptions
from models.moonshine.settings import SHORTEST_S, MoonshineSettings
from models.speech_to_text.extractors import read_extractor
from models.speech_to_text.mel import RATE
from models.speech_to_text.node_io import array_of, inline, medium_of
from models.speech_to_text.pauses import Levels
from models.speech_to_text.transcript import TRANSCRIPT, Segment, Transcript, compression_ratio
from models.text.tokenizer import load_tokenizer
from shared.errors import BugError, ClientError
from shared.tensors import Handle

SHORTEST_WINDOW_S: Final = 4
"""Windows of a long file are at least so long."""
_FIRST_WITHOUT_SPACES: Final = "\u2e80"
"""The first character of the scripts of East Asia, which have no spaces between words."""


def load(checkpoint: Path, *, max_seq_len: int, media: MediaReader) -> "MoonshineProcessing":
    """Read the settings and the tokenizer of a checkpoint. Windows fit `max_seq_len`.

    Raises:
        CheckpointError: a file is missing or malformed.
    """
    from transformers import Wav2Vec2FeatureExtractor  # noqa: PLC0415 - heavy: it imports torch

    extractor = read_extractor(Wav2Vec2FeatureExtractor, checkpoint)
    if extractor.sampling_rate != RATE:
        raise CheckpointError(
            f"{checkpoint}: expected sound of {RATE} samples per second, found {extractor.sampling_rate} in "
            "the settings of its features"
        )
    return MoonshineProcessing(checkpoint, extractor, max_seq_len, media)


class MoonshineProcessing(TextlessProcessing):
    """The CPU nodes of one checkpoint.

    Args:
        checkpoint: the folder.
        extractor: transformers' `Wav2Vec2FeatureExtractor`, which normalises samples if it is set to.
        max_seq_len: the most cells of a sequence.
        media: reads the file.
    """

    def __init__(self, checkpoint: Path, extractor: Any, max_seq_len: int, media: MediaReader) -> None:
        self._settings: Final = MoonshineSettings.read(checkpoint)
        self._tokenizer, _ = load_tokenizer(checkpoint)
        self._extractor, self._max_seq_len, self._media = extractor, max_seq_len, media

    def run(self, node: str, key: str, inputs: Mapping[str, Handle], args: Mapping[str, Any]) -> CpuResult:
        match node:
            case "listen":
                return self._listen(key, args)
            case "window":
                return self._window(args)
            case "transcript":
                return self._transcript(key, inputs, args)
            case "reader":
                found = msgspec.json.decode(inputs[TRANSCRIPT].data or b"", type=Transcript)
                facts = {"segments": len(found.segments), "tokens": found.tokens}
                return CpuResult(facts=facts, outputs={"read": inline(f"{key}/read", b"")})
            case _:
                raise BugError(f"moonshine has no CPU node {node!r}")

    def _listen(self, key: str, args: Mapping[str, Any]) -> CpuResult:
        """Read the file through: its length, its pauses, and whether it is damaged."""
        options = msgspec.convert(args["options"], MoonshineOptions)
        longest = self._settings.longest_window(options.tokens_per_second, self._max_seq_len)
        if longest < SHORTEST_WINDOW_S * RATE:
            raise ClientError(
                f"tokens_per_second: {options.tokens_per_second} leaves windows of {longest / RATE:.1f} s "
                f"for texts of {self._settings.positions} tokens and sequences of {self._max_seq_len}; "
                f"expected at least {SHORTEST_WINDOW_S} s: ask for fewer, or raise max_seq_len"
            )
        levels = Levels()
        self._media.audio_blocks(medium_of(args), rate=RATE, take=levels.add)
        if levels.samples < SHORTEST_S * RATE:
            raise MediaError(
                f"expected a file with at least {SHORTEST_S} s of sound, found {levels.samples / RATE:.3f} s"
            )
        windows = levels.windows(longest)
        heard = Heard(
            samples=levels.samples,
            starts=[window.first for window in windows],
            loudest=[window.loudest for window in windows],
            start=self._settings.start,
            positions=self._settings.positions,
        )
        return CpuResult(facts=msgspec.to_builtins(heard), outputs={"heard": inline(f"{key}/heard", b"")})

    def _window(self, args: Mapping[str, Any]) -> CpuResult:
        sound = self._media.audio_span(medium_of(args), rate=RATE, first=args["first"], count=args["count"])
        values = self._extractor(sound, sampling_rate=RATE, return_tensors="np").input_values[0]
        return CpuResult(outputs={"sound": np.asarray(values, np.float32)})

    def _transcript(self, key: str, inputs: Mapping[str, Handle], args: Mapping[str, Any]) -> CpuResult:
        first, stop, total = args["first"], args["first"] + args["count"], args["samples"]
        tokens, logprobs = (array_of(inputs[name]).tolist() for name in ("tokens", "logprobs"))
        tokens = [token for token in tokens if token != self._settings.end]
        text = self._text(tokens, is_first=not args["segments"])
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
            language="",
            language_name="",
            duration=total / RATE,
            seek=first * 100 // RATE,
            next_seek=stop * 100 // RATE,
            tokens=len(tokens),
            text=text,
            segments=[segment] if text.strip() else [],
            final=stop >= total,
        )
        outputs = {"text": text.encode(), TRANSCRIPT: found.encoded()}
        return CpuResult(outputs={name: inline(f"{key}/{name}", data) for name, data in outputs.items()})

    def _text(self, tokens: list[int], *, is_first: bool) -> str:
        """The text of tokens. After another text it begins with a space, in scripts that have them."""
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True).strip()
        if is_first or not text or text[0] >= _FIRST_WITHOUT_SPACES:
            return text
        return f" {text}"
