"""Graph of Pi0.5 (`models.robot_policy.graph`)."""

from typing import Final

from models.base import ModelGraph
from models.checkpoints.claims import CheckpointInfo, Claim
from models.robot_policy.graph import policy_graph
from models.robot_policy.room import room_of

MAX_TOKENS: Final = 200
"""The most tokens of a prompt, as openpi and lerobot have trained it."""


def claims(checkpoint: CheckpointInfo) -> Claim | None:
    """Claim lerobot's policies of the type pi05."""
    return Claim.ARCHITECTURE if checkpoint.config.get("type") == "pi05" else None


GRAPH: Final[ModelGraph] = policy_graph(
    "pi05",
    claims,
    serves="Pi0.5: lerobot's policies of the type pi05",
    repository="lerobot/pi05_base",
    room=room_of(MAX_TOKENS),
)
