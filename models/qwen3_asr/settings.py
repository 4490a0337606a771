"""The settings of a Qwen3-ASR checkpoint: languages, special tokens, the frames of its encoder. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final, Self

from models.checkpoints.files import CheckpointError, read_json, read_json_if_present
from models.speech_to_text.options import UnknownLanguageError

LANGUAGES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "ar": "Arabic",
        "cs": "Czech",
        "da": "Danish",
        "de": "German",
        "el": "Greek",
        "en": "English",
        "es": "Spanish",
        "fa": "Persian",
        "fi": "Finnish",
        "fil": "Filipino",
        "fr": "French",
        "hi": "Hindi",
        "hu": "Hungarian",
        "id": "Indonesian",
        "it": "Italian",
        "ja": "Japanese",
        "ko": "Korean",
        "mk": "Macedonian",
        "ms": "Malay",
        "nl": "Dutch",
        "pl": "Polish",
        "pt": "Portuguese",
        "ro": "Romanian",
        "ru": "Russian",
        "sv": "Swedish",
        "th": "Thai",
        "tr": "Turkish",
        "vi": "Vietnamese",
        "yue": "Cantonese",
        "zh": "Chinese",
    }
)
"""The languages as published, by their codes. The model reads and writes the names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3AsrSettings:
    """What the files of a checkpoint say.

    Attributes:
        place: the token in the prompt that the encoder's rows replace.
        ends: the tokens that end a text.
        chunk: the mel frames that the encoder's convolutions take at once.
        vocab_size: of the language model.
    """

    place: int
    ends: frozenset[int]
    chunk: int
    vocab_size: int

    @classmethod
    def read(cls, checkpoint: Path) -> Self:
        """Read the settings of a folder.

        Raises:
            CheckpointError: a file is missing or malformed, or in the layout of the package `qwen-asr`.
        """
        config = read_json(checkpoint / "config.json")
        if "thinker_config" in config:
            raise CheckpointError(
                f"{checkpoint / 'config.json'}: expected the layout of transformers, with audio_config and "
                "text_config; found that of the package qwen-asr (thinker_config): use the checkpoint whose "
                "name ends with -hf, such as Qwen/Qwen3-ASR-1.7B-hf"
            )
        generation = {**config, **read_json_if_present(checkpoint / "generation_config.json")}
        ends, place = generation.get("eos_token_id"), config.get("audio_token_id")
        ends = ends if isinstance(ends, list) else [ends]
        if not isinstance(place, int) or not all(isinstance(end, int) for end in ends):
            raise CheckpointError(
                f"{checkpoint}: expected token ids in audio_token_id and eos_token_id, found {place!r} and "
                f"{ends!r}; use the files that were published with the weights"
            )
        audio, text = config.get("audio_config") or {}, config.get("text_config") or {}
        return cls(
            place=place,
            ends=frozenset(ends),
            chunk=2 * int(audio.get("n_window", 50)),
            vocab_size=int(text.get("vocab_size", 151_936)),
        )

    def rows(self, frames: int) -> int:
        """The rows of so many mel frames: each of three convolutions halves a chunk."""
        whole, rest = divmod(frames, self.chunk)
        return whole * _halved(self.chunk) + _halved(rest)


def code_of(language: str | None) -> str | None:
    """The code of a language, which may be asked for by its English name; None is detected.

    Raises:
        UnknownLanguageError: the model does not know it.
    """
    asked = (language or "").strip().lower()
    if not asked:
        return None
    code = next((code for code, name in LANGUAGES.items() if name.lower() == asked), asked)
    if code not in LANGUAGES:
        raise UnknownLanguageError(
            f"language: expected one of {', '.join(LANGUAGES)}, or none, which detects it; "
            f"found {language!r:.80}"
        )
    return code


def _halved(frames: int) -> int:
    for _ in range(3):
        frames = (frames + 1) // 2
    return frames
