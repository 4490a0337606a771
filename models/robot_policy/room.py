"""The room that one observation takes in the KV cache. No torch."""

from collections.abc import Callable
from pathlib import Path
from typing import Final

from models.checkpoints.files import CONFIG
from models.robot_policy.settings import PolicySettings
from models.room import Room

_PATCH: Final = 14
"""The pixels in a row and in a column of a patch, of PaliGemma's encoder."""


def room_of(max_tokens: int) -> Callable[[Path], list[Room]]:
    """The estimate of a family (`ModelGraph.room`).

    Args:
        max_tokens: the most tokens of a prompt, where the checkpoint does not say.
    """

    def room(checkpoint: Path) -> list[Room]:
        if not (checkpoint / CONFIG).is_file():
            return []
        found = PolicySettings.read(checkpoint, max_tokens=max_tokens)
        images = len(found.cameras) * (found.image_size // _PATCH) ** 2
        # The state is a token of its own in Pi0, and a part of the prompt in Pi0.5.
        tokens = images + found.max_tokens + 1 + found.horizon
        return [Room(what=f"an observation of {len(found.cameras)} images", tokens=tokens)]

    return room
