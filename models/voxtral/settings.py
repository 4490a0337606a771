"""The settings of a Voxtral checkpoint: the tokens of its prompt, and the chunks of its encoder. No torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from models.checkpoints.files import CheckpointError, read_json, read_json_if_present
from models.speech_to_text.language_names import language_codes, language_names
from models.speech_to_text.options import UnknownLanguageError

_HOP: Final = 160
_BEFORE: Final = ("<s>", "[INST]", "[BEGIN_AUDIO]")
_AFTER: Final = "[/INST]"
_TASK: Final = "[TRANSCRIBE]"


@dataclass(frozen=True, slots=True, kw_only=True)
class VoxtralSettings:
    """What the files of a checkpoint say.

    Attributes:
        place: the token in the prompt that the encoder's rows replace.
        ends: the tokens that end a text.
        chunk: the samples that the encoder takes at once: 30 s.
        chunk_rows: the rows that it makes of them.
    """

    place: int
    ends: frozenset[int]
    chunk: int
    chunk_rows: int

    @classmethod
    def read(cls, checkpoint: Path) -> Self:
        """Read the settings of a folder.

        Raises:
            CheckpointError: a file is missing or malformed.
        """
        config = read_json(checkpoint / "config.json")
        generation = {**config, **read_json_if_present(checkpoint / "generation_config.json")}
        ends, place = generation.get("eos_token_id", 2), config.get("audio_token_id")
        ends = ends if isinstance(ends, list) else [ends]
        if not isinstance(place, int) or not all(isinstance(end, int) for end in ends):
            raise CheckpointError(
                f"{checkpoint}: expected token ids in audio_token_id and eos_token_id, found {place!r} and "
                f"{ends!r}; use the files that were published with the weights"
            )
        audio = config.get("audio_config") or {}
        positions = int(audio.get("max_source_positions", 1500))
        # Four states after each other are one row, as wide as the encoder's inner layer.
        grouped = int(audio.get("intermediate_size", 5120)) // int(audio.get("hidden_size", 1280))
        return cls(
            place=place, ends=frozenset(ends), chunk=2 * _HOP * positions, chunk_rows=positions // grouped
        )

    def rows(self, samples: int) -> int:
        """The rows of so many samples, which silence completes to whole chunks."""
        return -(-samples // self.chunk) * self.chunk_rows


@dataclass(frozen=True, slots=True)
class Prompt:
    """The published request for a transcription: special tokens around the sound, and the language as text.

    Attributes:
        before: the tokens in front of the sound.
        after: the token behind it.
        task: the last token.
    """

    before: tuple[int, ...]
    after: int
    task: int
    _tokenizer: Any

    @classmethod
    def read(cls, tokenizer: Any, checkpoint: Path) -> Self:
        """Find the special tokens.

        Raises:
            CheckpointError: the tokenizer lacks one.
        """
        found = {name: tokenizer.token_to_id(name) for name in (*_BEFORE, _AFTER, _TASK)}
        missing = [name for name, id in found.items() if id is None]
        if missing:
            raise CheckpointError(
                f"{checkpoint}: expected the tokens of a request for a transcription in tekken.json, found "
                f"no {', '.join(missing)}; use the files that were published with the weights"
            )
        return cls(tuple(found[name] for name in _BEFORE), found[_AFTER], found[_TASK], tokenizer)

    def ids(self, place: int, code: str | None) -> list[int]:
        """The tokens in front of a text, with `place` for the sound."""
        language: list[int] = []
        if code is not None:
            language = self._tokenizer.encode(f"lang:{code}", add_special_tokens=False).ids
        return [*self.before, place, self.after, *language, self.task]


def code_of(language: str | None) -> str | None:
    """The code of a language, which may be asked for by its English name; None is detected.

    Raises:
        UnknownLanguageError: it has no code of two letters, which prompts are written with.
    """
    asked = (language or "").strip().lower()
    if not asked:
        return None
    code = language_codes().get(asked, asked)
    if len(code) != 2 or code not in language_names():
        known = sorted(code for code in language_names() if len(code) == 2)
        raise UnknownLanguageError(
            f"language: expected one of {', '.join(known)}, or its name in English, or none, which detects "
            f"it; found {language!r:.80}"
        )
    return code
