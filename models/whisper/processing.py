"""The CPU nodes of Whisper: the file, its windows, and the transcript of tokens."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from models.base import CpuResult, MediaReader, TextlessProcessing
from models.checkpoints.files import CheckpointError
from models.options import InvalidOptionError
from models.speech_to_text.extractors import read_extractor
from models.speech_to_text.mel import RATE, LoudestFrame, MelSettings, window_features
from models.speech_to_text.node_io import array_of, inline, medium_of
from models.speech_to_text.options import SpeechOptions
from models.speech_to_text.transcript import TRANSCRIPT, Transcript
from models.text.tokenizer import PromptTokenizer, load_tokenizer
from models.whisper.graph import Heard, Read
from models.whisper.languages import Languages
from models.whisper.segments import STRIDE
from models.whisper.settings import WhisperSettings
from models.whisper.window_text import WindowText, WindowTokens
from shared.errors import BugError
from shared.tensors import Handle

if TYPE_CHECKING:
    import numpy.typing as npt


def load(checkpoint: Path, *, max_seq_len: int, media: MediaReader) -> "WhisperProcessing":
    """Read the settings and the tokenizer of a checkpoint; `max_seq_len` has no meaning here.

    Raises:
        CheckpointError: a file is missing or malformed.
    """
    settings, mel = WhisperSettings.read(checkpoint), mel_settings(checkpoint)
    if mel.frames != STRIDE * settings.frames:
        raise CheckpointError(
            f"{checkpoint}: expected windows of {STRIDE * settings.frames} mel frames, as config.json says "
            f"(max_source_positions), found {mel.frames} in the settings of its features"
        )
    return WhisperProcessing(checkpoint, settings, mel, media)


def mel_settings(checkpoint: Path) -> MelSettings:
    """The settings of the features, by transformers' own extractor.

    Raises:
        CheckpointError: their file is missing or malformed.
    """
    from transformers import WhisperFeatureExtractor  # noqa: PLC0415 - heavy: it imports torch

    return MelSettings.of(read_extractor(WhisperFeatureExtractor, checkpoint))


class WhisperProcessing(TextlessProcessing):
    """The CPU nodes of one checkpoint."""

    def __init__(
        self, checkpoint: Path, settings: WhisperSettings, mel: MelSettings, media: MediaReader
    ) -> None:
        tokenizer, _ = load_tokenizer(checkpoint)
        self._settings, self._mel, self._media = settings, mel, media
        self._tokenizer: Final = tokenizer
        self._prompts: Final = PromptTokenizer(tokenizer, vocab_size=settings.vocab_size, max_seq_len=1 << 20)
        self._languages: Final = Languages(settings)

    def run(self, node: str, key: str, inputs: Mapping[str, Handle], args: Mapping[str, Any]) -> CpuResult:
        match node:
            case "listen":
                return self._listen(key, args)
            case "window":
                return self._window(args)
            case "transcript":
                return self._transcript(key, inputs, args)
            case "reader":
                return self._read(key, inputs[TRANSCRIPT])
            case _:
                raise BugError(f"whisper has no CPU node {node!r}")

    def _listen(self, key: str, args: Mapping[str, Any]) -> CpuResult:
        """Check the options before the file is decoded, then read it through."""
        options = msgspec.convert(args["options"], SpeechOptions)
        language = self._languages.token_of(options)
        if "word" in options.timestamps and not self._settings.alignment_heads:
            raise InvalidOptionError(
                "timestamps",
                "timestamps: this checkpoint has no alignment_heads in generation_config.json, which times "
                "of words need; ask for times of segments",
            )
        prompt_ids = self._prompt_ids(options.prompt)
        loudest = LoudestFrame(settings=self._mel)
        self._media.audio_blocks(medium_of(args), rate=RATE, take=loudest.add)
        largest = loudest.finish()
        is_long = loudest.samples > self._mel.samples
        heard = Heard(
            samples=loudest.samples,
            frames=loudest.samples // self._mel.hop if is_long else self._mel.frames,
            loudest=largest,
            language=language,
            prompt_ids=prompt_ids,
            has_times=is_long or bool(options.timestamps),
        )
        return CpuResult(facts=msgspec.to_builtins(heard), outputs={"heard": inline(f"{key}/heard", b"")})

    def _prompt_ids(self, prompt: str) -> list[int]:
        """The last tokens of a prompt, with the one that begins it."""
        if not prompt.strip():
            return []
        if self._settings.previous is None:
            raise InvalidOptionError("prompt", "prompt: this model takes none; leave it out")
        ids = self._prompts.encode(f" {prompt.strip()}", add_special_tokens=False, what="prompt")
        if any(token >= self._settings.end for token in ids):
            raise InvalidOptionError(
                "prompt", "prompt: expected a text without special tokens such as <|endoftext|>"
            )
        return [self._settings.previous, *ids[-self._settings.longest_prompt :]]

    def _window(self, args: Mapping[str, Any]) -> CpuResult:
        heard, medium = msgspec.convert(args["heard"], Heard), medium_of(args)

        def read(first: int, count: int) -> "npt.NDArray[np.float32]":
            return self._media.audio_span(medium, rate=RATE, first=first, count=count)

        features = window_features(
            self._mel, read, samples=heard.samples, first=args["seek"], loudest=heard.loudest
        )
        return CpuResult(outputs={"features": features})

    def _transcript(self, key: str, inputs: Mapping[str, Handle], args: Mapping[str, Any]) -> CpuResult:
        heard = msgspec.convert(args["heard"], Heard)
        options = msgspec.convert(args["options"], SpeechOptions)
        window = WindowText(
            settings=self._settings,
            tokenizer=self._tokenizer,
            languages=self._languages,
            tokens=WindowTokens.of({name: array_of(handle) for name, handle in inputs.items()}),
            seek=args["seek"],
            frames=min(self._mel.frames, heard.frames - args["seek"]),
            sounding=-(-heard.samples // self._mel.hop) - args["seek"],
            first_segment=args["segments"],
        )
        found = window.transcript(
            duration=heard.samples / RATE,
            total=heard.frames,
            has_times=heard.has_times,
            has_words="word" in options.timestamps,
        )
        return CpuResult(
            outputs={
                "text": inline(f"{key}/text", found.text.encode()),
                TRANSCRIPT: inline(f"{key}/{TRANSCRIPT}", found.encoded()),
            }
        )

    def _read(self, key: str, transcript: Handle) -> CpuResult:
        found = msgspec.json.decode(transcript.data or b"", type=Transcript)
        read = Read(
            seek=found.next_seek,
            segments=len(found.segments),
            language=self._settings.languages.get(found.language),
            tokens=found.tokens,
        )
        return CpuResult(facts=msgspec.to_builtins(read), outputs={"read": inline(f"{key}/read", b"")})
