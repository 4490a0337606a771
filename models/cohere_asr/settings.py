"""The settings of a Cohere Transcribe checkpoint: its prompt, languages and limits. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final, Self

from models.checkpoints.files import CheckpointError, read_json, read_json_if_present
from models.speech_to_text.options import UnknownLanguageError
from models.text.tokenizer import load_tokenizer

LANGUAGES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "ar": "arabic",
        "de": "german",
        "el": "greek",
        "en": "english",
        "es": "spanish",
        "fr": "french",
        "it": "italian",
        "ja": "japanese",
        "ko": "korean",
        "nl": "dutch",
        "pl": "polish",
        "pt": "portuguese",
        "vi": "vietnamese",
        "zh": "chinese",
    }
)
"""The languages as published, by their codes. A checkpoint has those whose token it knows."""
FRAME: Final = 160 * 8
"""The samples of a frame of the encoder."""
_SPACE: Final = "\N{LOWER ONE EIGHTH BLOCK}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CohereSettings:
    """What the files of a checkpoint say.

    Attributes:
        start: the token that begins every text, before a prompt that begins with another one.
        end: the token after a text.
        positions: the most tokens of a text with its prompt.
        tokens: the ids of the tokens of prompts.
    """

    start: int | None
    end: int
    positions: int
    tokens: Mapping[str, int]

    @classmethod
    def read(cls, checkpoint: Path) -> Self:
        """Read the settings of a folder.

        Raises:
            CheckpointError: a file is missing, malformed, or lacks a token.
        """
        config = read_json(checkpoint / "config.json")
        generation = {**config, **read_json_if_present(checkpoint / "generation_config.json")}
        tokenizer, _ = load_tokenizer(checkpoint)
        names = {
            name
            for code in LANGUAGES
            for is_punctuated in (True, False)
            for name in _prompt(code, is_punctuated=is_punctuated)
        }
        found = {name: tokenizer.token_to_id(name) for name in sorted(names)}
        missing = [name for name, id in found.items() if id is None and name not in map(_mark, LANGUAGES)]
        if missing or not isinstance(generation.get("eos_token_id"), int):
            raise CheckpointError(
                f"{checkpoint}: expected the token that ends a text (eos_token_id) and those of its prompt; "
                f"found {generation.get('eos_token_id')!r} and no {', '.join(missing)}; use the files that "
                "were published with the weights"
            )
        start = generation.get("decoder_start_token_id")
        return cls(
            start=generation.get("bos_token_id") if start is None else start,
            end=generation["eos_token_id"],
            positions=int(config.get("max_position_embeddings", 1024)),
            tokens={name: id for name, id in found.items() if id is not None},
        )

    @property
    def languages(self) -> list[str]:
        """The codes of the languages."""
        return [code for code in LANGUAGES if _mark(code) in self.tokens]

    def code_of(self, language: str | None) -> str:
        """The code of a language, which may be asked for by its English name.

        Raises:
            UnknownLanguageError: the model does not know it, or none is named.
        """
        asked = (language or "").strip().lower()
        code = next((code for code, name in LANGUAGES.items() if name == asked), asked)
        if code not in self.languages:
            raise UnknownLanguageError(
                f"language: expected one of {', '.join(self.languages)}, as this model does not detect it; "
                f"found {'none' if language is None else repr(language)[:80]}"
            )
        return code

    def before(self, code: str, *, is_punctuated: bool) -> list[int]:
        """The tokens in front of a text in a language, with punctuation and capitals or without."""
        found = [self.tokens[name] for name in _prompt(code, is_punctuated=is_punctuated)]
        return found if self.start is None or self.start == found[0] else [self.start, *found]


def _prompt(code: str, *, is_punctuated: bool) -> list[str]:
    """The tokens of a prompt: no emotion, numbers as they are spoken, no times, no speakers."""
    return [
        _SPACE,
        "<|startofcontext|>",
        "<|startoftranscript|>",
        "<|emo:undefined|>",
        _mark(code),
        _mark(code),
        "<|pnc|>" if is_punctuated else "<|nopnc|>",
        "<|noitn|>",
        "<|notimestamp|>",
        "<|nodiarize|>",
    ]


def _mark(code: str) -> str:
    return f"<|{code}|>"
