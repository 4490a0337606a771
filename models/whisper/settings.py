"""The settings of a Whisper checkpoint: its special tokens, languages and limits. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from models.checkpoints.files import CheckpointError, read_json, read_json_if_present

_REQUIRED: Final = ("decoder_start_token_id", "eos_token_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class WhisperSettings:
    """What `config.json` and `generation_config.json` say.

    Attributes:
        frames: the encoder's frames of a window: half of its mel frames.
        positions: the most tokens of a window, those of the prompt included.
        max_length: the most tokens of a window after those that precede it, as transformers counts them.
        languages: the token of each language, by its code; empty for a model of one language.
        tasks: the token of each task, by its name.
        no_timestamps: the token of a text without times; the tokens after it are times.
        previous: the token before a prompt; None if the model takes none.
        alignment_heads: layers and heads of the cross-attention that follow the speech.
        median_width: the width of the median filter over their weights.
    """

    start: int
    end: int
    frames: int
    positions: int
    max_length: int
    vocab_size: int
    languages: Mapping[str, int]
    tasks: Mapping[str, int]
    no_timestamps: int
    previous: int | None
    alignment_heads: tuple[tuple[int, int], ...]
    median_width: int

    @classmethod
    def read(cls, checkpoint: Path) -> Self:
        """Read the settings of a folder.

        Raises:
            CheckpointError: a file is missing, malformed, or lacks a token.
        """
        config = read_json(checkpoint / "config.json")
        generation = {**config, **read_json_if_present(checkpoint / "generation_config.json")}
        for name in (*_REQUIRED, "no_timestamps_token_id"):
            if not isinstance(generation.get(name), int):
                raise CheckpointError(
                    f"{checkpoint / 'generation_config.json'}: expected an integer in {name}, found "
                    f"{generation.get(name)!r}; use the file that was published with the weights"
                )
        languages = {
            token.removeprefix("<|").removesuffix("|>"): int(found)
            for token, found in (generation.get("lang_to_id") or {}).items()
        }
        positions = int(config.get("max_target_positions", 448))
        heads = generation.get("alignment_heads") or ()
        return cls(
            start=int(generation["decoder_start_token_id"]),
            end=int(generation["eos_token_id"]),
            frames=int(config.get("max_source_positions", 1500)),
            positions=positions,
            max_length=int(generation.get("max_length") or positions),
            vocab_size=int(config["vocab_size"]),
            languages=languages if generation.get("is_multilingual", bool(languages)) else {},
            tasks={name: int(found) for name, found in (generation.get("task_to_id") or {}).items()},
            no_timestamps=int(generation["no_timestamps_token_id"]),
            previous=_previous(generation),
            alignment_heads=tuple((int(layer), int(head)) for layer, head in heads),
            median_width=int(config.get("median_filter_width", 7)),
        )

    @property
    def first_time(self) -> int:
        """The token of the time 0; each token after it is 0.02 s later."""
        return self.no_timestamps + 1

    @property
    def longest_prompt(self) -> int:
        """The most tokens of a prompt before a window, as published."""
        return self.positions // 2 - 1

    def language_of(self, token: int) -> str:
        """The code of a language's token; empty if it is none."""
        return next((code for code, found in self.languages.items() if found == token), "")

    def first_tokens(self, language: int | None, task: str, *, has_times: bool) -> list[int]:
        """The tokens that begin a window: start, language, task, and whether times are written."""
        tokens = [self.start]
        if language is not None:
            tokens += [language, self.tasks[task]]
        return tokens if has_times else [*tokens, self.no_timestamps]

    def most_tokens(self, before: int) -> int:
        """The most tokens of a window with `before` tokens in front, these included."""
        return min(self.max_length + min(self.longest_prompt, before), self.positions)


def _previous(generation: Mapping[str, Any]) -> int | None:
    found = generation.get("prev_sot_token_id")
    suppressed: Sequence[Any] = generation.get("suppress_tokens") or []
    if found is None and len(suppressed) > 1:
        found = suppressed[-2]  # where the published files have it
    return found if isinstance(found, int) and found >= 0 else None
