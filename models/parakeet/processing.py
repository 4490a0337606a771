"""The CPU nodes of Parakeet: the file, its windows, and the transcript of a window's tokens."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from models.base import CpuResult, MediaReader, TextlessProcessing
from models.checkpoints.files import CheckpointError, read_json
from models.media.kinds import MediaError
from models.parakeet.ctc import segments_of, spoken, words_of
from models.parakeet.graph import CONTEXT_S, WINDOW_S, CtcOptions
from models.speech_to_text.extractors import read_extractor
from models.speech_to_text.mel import RATE
from models.speech_to_text.node_io import array_of, inline, medium_of
from models.speech_to_text.transcript import TRANSCRIPT, Transcript
from models.text.tokenizer import load_tokenizer
from shared.errors import BugError
from shared.tensors import Handle

_WORD_MARK: Final = "\N{LOWER ONE EIGHTH BLOCK}"
"""The beginning of a piece that begins a word."""


def load(checkpoint: Path, *, max_seq_len: int, media: MediaReader) -> "ParakeetProcessing":
    """Read the settings and the tokenizer of a checkpoint; `max_seq_len` has no meaning here.

    Raises:
        CheckpointError: a file is missing or malformed.
    """
    from transformers import ParakeetFeatureExtractor  # noqa: PLC0415 - heavy: it imports torch

    extractor = read_extractor(ParakeetFeatureExtractor, checkpoint)
    config = read_json(checkpoint / "config.json")
    factor = config.get("encoder_config", {}).get("subsampling_factor", 8)
    frame = int(factor) * int(extractor.hop_length)
    if extractor.sampling_rate != RATE or (CONTEXT_S * RATE) % frame or (WINDOW_S * RATE) % frame:
        raise CheckpointError(
            f"{checkpoint}: expected sound of {RATE} samples per second in frames that divide a second's "
            f"multiples; found {extractor.sampling_rate}, and frames of {frame} samples"
        )
    tokenizer, _ = load_tokenizer(checkpoint)
    return ParakeetProcessing(extractor, tokenizer, int(config["pad_token_id"]), frame, media)


class ParakeetProcessing(TextlessProcessing):
    """The CPU nodes of one checkpoint.

    Args:
        extractor: transformers' `ParakeetFeatureExtractor`.
        tokenizer: `tokenizers.Tokenizer`.
        blank: the token of a frame without one.
        frame: the samples of a frame of the encoder.
        media: reads the file.
    """

    def __init__(self, extractor: Any, tokenizer: Any, blank: int, frame: int, media: MediaReader) -> None:
        self._extractor, self._tokenizer, self._media = extractor, tokenizer, media
        self._blank, self._frame = blank, frame

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
                raise BugError(f"parakeet has no CPU node {node!r}")

    def _listen(self, key: str, args: Mapping[str, Any]) -> CpuResult:
        """Read the file through: its length, and whether it is damaged."""
        lengths: list[int] = []
        self._media.audio_blocks(medium_of(args), rate=RATE, take=lambda block: lengths.append(len(block)))
        if sum(lengths) < self._extractor.n_fft:
            error = MediaError(
                f"expected a file with sound of at least {self._extractor.n_fft} samples at {RATE} per "
                f"second, found {sum(lengths)}"
            )
            error.digest = medium_of(args).digest
            raise error
        return CpuResult(facts={"samples": sum(lengths)}, outputs={"heard": inline(f"{key}/heard", b"")})

    def _window(self, args: Mapping[str, Any]) -> CpuResult:
        first = _first(args["start"])
        stop = min(args["start"] + (WINDOW_S + CONTEXT_S) * RATE, args["samples"])
        if args["samples"] <= WINDOW_S * RATE:
            stop = args["samples"]
        sound = self._media.audio_span(medium_of(args), rate=RATE, first=first, count=stop - first)
        features = self._extractor(sound, sampling_rate=RATE, return_tensors="np").input_features[0]
        return CpuResult(outputs={"features": np.asarray(features, np.float32)})

    def _transcript(self, key: str, inputs: Mapping[str, Handle], args: Mapping[str, Any]) -> CpuResult:
        options = msgspec.convert(args["options"], CtcOptions)
        start, begin = args["start"], _first(args["start"])
        is_last = start + WINDOW_S * RATE >= args["samples"]
        ids, logprobs = (array_of(inputs[name]).tolist() for name in ("ids", "logprobs"))
        first = (start - begin) // self._frame
        stop = len(ids) if is_last else first + WINDOW_S * RATE // self._frame
        words = words_of(
            spoken(ids, logprobs, blank=self._blank, first=first, stop=stop),
            decode=self._text,
            begins_word=self._begins_word,
            frame_s=self._frame / RATE,
            offset_s=begin / RATE,
        )
        segments = segments_of(
            words,
            decode=self._text,
            first_id=args["segments"],
            seek=start * 100 // RATE,
            has_words="word" in options.timestamps,
        )
        found = Transcript(
            language="",
            language_name="",
            duration=args["samples"] / RATE,
            seek=start * 100 // RATE,
            next_seek=min(start + WINDOW_S * RATE, args["samples"]) * 100 // RATE,
            tokens=sum(len(one) for _, one in words),
            text="".join(one.text for one in segments),
            segments=segments,
            final=is_last,
        )
        text = inline(f"{key}/text", found.text.encode())
        return CpuResult(outputs={"text": text, TRANSCRIPT: inline(f"{key}/{TRANSCRIPT}", found.encoded())})

    def _text(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def _begins_word(self, token: int) -> bool:
        piece: str = self._tokenizer.id_to_token(token) or ""
        return piece.startswith(_WORD_MARK)


def _first(start: int) -> int:
    """The first sample that the encoder hears of a window."""
    return max(start - CONTEXT_S * RATE, 0)
