"""The settings of a Moonshine checkpoint, and the limits that follow from them. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, Final, Self

from models.checkpoints.files import CheckpointError, read_json, read_json_if_present
from models.speech_to_text.mel import RATE

STREAMING: Final = "MoonshineStreamingForConditionalGeneration"
ARCHITECTURES: Final = ("MoonshineForConditionalGeneration", STREAMING)
LONGEST_S: Final = 64
"""The longest sound that the model takes at once, as published."""
_ROOM: Final = 8
"""Cells beside frames and text: the convolutions and roundings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoonshineSettings:
    """What `config.json` and `generation_config.json` say.

    Attributes:
        is_streaming: the encoder sees a few frames ahead, and its frames have learned positions.
        start: the token before every text.
        end: the token after it.
        positions: the most tokens of a text, with `start`.
        frame: the samples of a frame of the encoder.
        multiple: the encoder takes so many samples, or a multiple of it; the rest is padding.
        most_frames: the most frames of the encoder.
    """

    is_streaming: bool
    start: int
    end: int
    positions: int
    frame: int
    multiple: int
    most_frames: float

    @classmethod
    def read(cls, checkpoint: Path) -> Self:
        """Read the settings of a folder.

        Raises:
            CheckpointError: a file is missing, malformed, or lacks a token.
        """
        config = read_json(checkpoint / "config.json")
        generation = {**config, **read_json_if_present(checkpoint / "generation_config.json")}
        positions = int(config.get("max_position_embeddings", 512))
        encoder = config.get("encoder_config") or {}
        is_streaming = STREAMING in (config.get("architectures") or ())
        # Of samples: the strides of three convolutions. Of the streaming one: of two, after pieces of 5 ms.
        multiple = int(RATE * encoder.get("frame_ms", 5.0)) // 1000 if is_streaming else 1
        return cls(
            is_streaming=is_streaming,
            start=_token(generation, ("decoder_start_token_id", "bos_token_id"), checkpoint),
            end=_token(generation, ("eos_token_id",), checkpoint),
            positions=min(positions, int(generation.get("max_length") or positions)),
            frame=multiple * 2 * 2 if is_streaming else 64 * 3 * 2,
            multiple=multiple,
            most_frames=positions if is_streaming else inf,
        )

    @property
    def longest_sequence(self) -> int:
        """The cells of the longest sound and text."""
        return LONGEST_S * RATE // self.frame + self.positions + _ROOM

    def longest_window(self, tokens_per_second: float, max_seq_len: int) -> int:
        """The most samples of a window: its frames and text have to fit their positions, and the context.

        Args:
            tokens_per_second: the most tokens of a second of sound.
            max_seq_len: the most cells of a sequence.
        """
        by_text = self.positions / tokens_per_second
        by_frames = (self.most_frames - 1) * self.frame / RATE
        by_cells = (max_seq_len - _ROOM) / (RATE / self.frame + tokens_per_second)
        return int(min(LONGEST_S, by_text, by_frames, by_cells) * RATE)


def most_tokens(samples: int, tokens_per_second: float, positions: int) -> int:
    """The most tokens of a window with the start token, as published; those of a second at least."""
    return max(min(int(max(samples, RATE) * tokens_per_second / RATE), positions), 2)


def _token(generation: Mapping[str, Any], names: tuple[str, ...], checkpoint: Path) -> int:
    """The token that the first of some names has."""
    found = next((generation[name] for name in names if generation.get(name) is not None), None)
    if isinstance(found, list) and len(found) == 1:
        found = found[0]
    if not isinstance(found, int):
        raise CheckpointError(
            f"{checkpoint / 'config.json'}: expected a token in {names[0]}, found {found!r}; use the "
            "file that was published with the weights"
        )
    return found
