"""Inputs of the recordings: random numbers, equal in every process."""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

HORIZON: Final = 6
SEED: Final = 11
GOAL_FRAME: Final = 5
POSE: Final[Floats] = np.array([0.3, -0.1, 0.4, 2.9, 0.2, -1.1, 0.5], np.float32)
_CEM: Final = {
    "rollout": 2, "samples": 12, "topk": 3, "cem_steps": 3, "momentum_mean": 0.15, "momentum_std": 0.2,
    "momentum_mean_gripper": 0.1, "momentum_std_gripper": 0.25, "maxnorm": 0.05,
}  # fmt: skip
PLANS: Final[dict[str, dict[str, Any]]] = {
    "plan": {"mpc_args": _CEM, "close_gripper": None},
    "closing": {"mpc_args": {**_CEM, "rollout": 3, "maxnorm": 0.5, "samples": 8}, "close_gripper": 1},
}


def clip() -> Floats:
    """The pixels of a clip, (8, 3, 64, 64)."""
    return np.random.default_rng(1).standard_normal((8, 3, 64, 64)).astype(np.float32)


def trajectory() -> tuple[Floats, Floats, Floats]:
    """Actions, states and extrinsics of `HORIZON` steps."""
    drawn = np.random.default_rng(2).standard_normal((HORIZON, 20)).astype(np.float32)
    return drawn[:, :7].copy(), drawn[:, 7:14].copy(), drawn[:, 14:].copy()


def movements() -> tuple[Floats, Floats]:
    """Poses and actions with all kinds of rotations, (50, 7) each."""
    drawn = np.random.default_rng(3).uniform(-3, 3, (2, 50, 7)).astype(np.float32)
    return drawn[0], drawn[1]
