"""Graph of Pi0 (`models.robot_policy.graph`)."""

from typing import Final

from models.base import ModelGraph
from models.checkpoints.claims import CheckpointInfo, Claim
from models.robot_policy.graph import policy_graph
from models.robot_policy.room import room_of

MAX_TOKENS: Final = 48
"""The most tokens of a prompt, as openpi and lerobot have trained it."""


def claims(checkpoint: CheckpointInfo) -> Claim | None:
    """Claim lerobot's policies of the type pi0, and transformers' class."""
    is_pi0 = (
        checkpoint.config.get("type") == "pi0" or checkpoint.architecture == "PI0ForConditionalGeneration"
    )
    return Claim.ARCHITECTURE if is_pi0 else None


GRAPH: Final[ModelGraph] = policy_graph(
    "pi0",
    claims,
    serves="Pi0: lerobot's policies of the type pi0, the architecture PI0ForConditionalGeneration",
    repository="lerobot/pi0_base",
    room=room_of(MAX_TOKENS),
)
