"""The `config.json` of a policy, as lerobot, openpi's converter or transformers write it. No torch.

lerobot        {"type": "pi05", "chunk_size": 50, "max_action_dim": 32, "input_features": {...}, ...}
openpi         {"action_horizon": 50, "action_dim": 32, ...}
transformers   {"model_type": "pi0", "vlm_config": {...}, "dit_config": {...}, "chunk_size": 50, ...}
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from models.checkpoints.files import CheckpointError, UnsupportedArchitectureError, read_json
from models.robot_policy.graph import MAX_HORIZON, MAX_STEPS

CAMERA: Final = "observation.images."
"""The prefix of lerobot's names of cameras."""
_UNSUPPORTED: Final = ("use_relative_actions", "use_visual_memory", "use_proprioceptive_memory")
_IMAGE_SIZE: Final = 224
_DEFAULT_CAMERAS: Final = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySettings:
    """The facts that a checkpoint states about its policy.

    Attributes:
        horizon: the actions of a chunk.
        action_dim, state_dim: the numbers in an action and in a state as the model computes them.
        robot_dim: the leading numbers of an action that the robot has; the others are padding.
        steps: the steps of the flow.
        min_period, max_period: of the sines that stand for a time of the flow.
        max_tokens: the most tokens of instruction and state.
        image_size: the pixels in a row and in a column of an image.
        cameras: the names of its cameras, in the order of the prefix.
        is_transformers: the layout is that of transformers.
    """

    horizon: int
    action_dim: int
    state_dim: int
    robot_dim: int
    steps: int
    min_period: float
    max_period: float
    max_tokens: int
    image_size: int
    cameras: tuple[str, ...]
    is_transformers: bool

    @classmethod
    def read(
        cls, checkpoint: Path, *, max_tokens: int, kwargs: Mapping[str, Any] | None = None
    ) -> "PolicySettings":
        """Read `config.json`; the deployment's `kwargs` replace `action_horizon` and `num_flow_steps`.

        Args:
            checkpoint: the folder.
            kwargs: the deployment's `model_kwargs`.
            max_tokens: for checkpoints that do not say it.

        Raises:
            CheckpointError: the file is missing or malformed, or a value is out of its range.
            UnsupportedArchitectureError: the policy uses something that is not served.
        """
        raw = read_json(checkpoint / "config.json") | dict(kwargs or {})
        if used := [name for name in _UNSUPPORTED if raw.get(name)]:
            raise UnsupportedArchitectureError(
                f"{checkpoint / 'config.json'}: {', '.join(used)} is set, which is not served: expected a "
                "policy of single observations and absolute actions"
            )
        action_dim = _count(raw, checkpoint, 32, 4096, "max_action_dim", "action_dim")
        shape = raw.get("output_features", {}).get("action", {}).get("shape", [action_dim])
        features = raw.get("input_features", {})
        return cls(
            horizon=_count(raw, checkpoint, 50, MAX_HORIZON, "action_horizon", "chunk_size"),
            action_dim=action_dim,
            state_dim=_count(raw, checkpoint, action_dim, 4096, "max_state_dim"),
            robot_dim=min(int(shape[0]), action_dim),
            steps=_count(raw, checkpoint, 10, MAX_STEPS, "num_flow_steps", "num_inference_steps"),
            min_period=float(raw.get("min_period", 4e-3)),
            max_period=float(raw.get("max_period", 4.0)),
            max_tokens=_count(raw, checkpoint, max_tokens, 65_536, "tokenizer_max_length", "max_token_len"),
            image_size=_image_size(raw),
            cameras=tuple(name.removeprefix(CAMERA) for name in features if name.startswith(CAMERA))
            or _DEFAULT_CAMERAS,
            is_transformers="vlm_config" in raw,
        )


def _count(raw: Mapping[str, Any], checkpoint: Path, default: int, limit: int, *names: str) -> int:
    """The first value that is there under one of the names: an integer from 1 to `limit`."""
    name = next((name for name in names if raw.get(name) is not None), names[0])
    found = raw.get(name, default)
    if not isinstance(found, int) or isinstance(found, bool) or not 1 <= found <= limit:
        raise CheckpointError(
            f"{checkpoint}: expected an integer from 1 to {limit} in {name} (config.json, or model_kwargs), "
            f"found {found!r}"
        )
    return found


def _image_size(raw: Mapping[str, Any]) -> int:
    if "vlm_config" in raw:
        return int(raw["vlm_config"].get("vision_config", {}).get("image_size", _IMAGE_SIZE))
    return int(raw.get("image_resolution", [_IMAGE_SIZE])[0])
