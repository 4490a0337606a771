"""The settings of a Moonshine checkpoint, and the limits that follow from them. No torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from models.checkpoints.files import CheckpointError, read_json, read_json_if_present
from models.speech_to_text.mel import RATE

LONGEST_S: Final = 64
"""The longest sound that the model takes at once, as published."""
FRAME: Final = 64 * 3 * 2
"""The samples of a frame: the strides of the encoder's three convolutions."""
_ROOM: Final = 8
"""Cells beside frames and text: the convolutions and roundings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoonshineSettings:
    """What `config.json` and `generation_config.json` say.

    Attributes:
        start: the token before every text.
        end: the token after it.
        positions: the most tokens of a text, with `start`.
    """

    start: int
    end: int
    positions: int

    @classmethod
    def read(cls, checkpoint: Path) -> Self:
        """Read the settings of a folder.

        Raises:
            CheckpointError: a file is missing, malformed, or lacks a token.
        """
        config = read_json(checkpoint / "config.json")
        generation = {**config, **read_json_if_present(checkpoint / "generation_config.json")}
        positions = int(config.get("max_position_embeddings", 512))
        return cls(
            start=_token(generation, "decoder_start_token_id", checkpoint),
            end=_token(generation, "eos_token_id", checkpoint),
            positions=min(positions, int(generation.get("max_length") or positions)),
        )

    @property
    def longest_sequence(self) -> int:
        """The cells of the longest sound and text."""
        return LONGEST_S * RATE // FRAME + self.positions + _ROOM

    def longest_window(self, tokens_per_second: float, max_seq_len: int) -> int:
        """The most samples of a window, whose text has to fit its positions, and both the context.

        Args:
            tokens_per_second: the most tokens of a second of sound.
            max_seq_len: the most cells of a sequence.
        """
        by_text = self.positions / tokens_per_second
        by_cells = (max_seq_len - _ROOM) / (RATE / FRAME + tokens_per_second)
        return int(min(LONGEST_S, by_text, by_cells) * RATE)


def most_tokens(samples: int, tokens_per_second: float, positions: int) -> int:
    """The most tokens of a window with the start token, as published; those of a second at least."""
    return max(min(int(max(samples, RATE) * tokens_per_second / RATE), positions), 2)


def _token(generation: dict[str, Any], name: str, checkpoint: Path) -> int:
    found = generation.get(name)
    if isinstance(found, list) and len(found) == 1:
        found = found[0]
    if not isinstance(found, int):
        raise CheckpointError(
            f"{checkpoint / 'config.json'}: expected a token in {name}, found {found!r}; use the file that "
            "was published with the weights"
        )
    return found
