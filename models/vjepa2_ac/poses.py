"""Poses of a robot's gripper behind an action. The published code uses SciPy's rotations for it.

A pose is place (3), rotation (3), and how far the gripper is closed, 0 to 1. A rotation is angles around the
fixed axes x, y and z, in radians, applied in this order.
"""

from typing import Final

import torch

_LOCKED: Final = 1e-7
"""Cosines of the second angle below which the first and the last one cannot be told apart."""


def moved(poses: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
    """Return the poses behind actions, (..., 7) each: places add, rotations follow, grippers are clipped."""
    poses, actions = poses.double(), actions.double()
    angles = angles_of(matrices_of(actions[..., 3:6]) @ matrices_of(poses[..., 3:6]))
    gripper = (poses[..., 6:] + actions[..., 6:]).clamp(0, 1)
    return torch.cat([poses[..., :3] + actions[..., :3], angles, gripper], dim=-1).float()


def matrices_of(angles: torch.Tensor) -> torch.Tensor:
    """(..., 3) -> (..., 3, 3)."""
    (cos_x, cos_y, cos_z), (sin_x, sin_y, sin_z) = angles.cos().unbind(-1), angles.sin().unbind(-1)
    rows = (
        (cos_z * cos_y, cos_z * sin_y * sin_x - sin_z * cos_x, cos_z * sin_y * cos_x + sin_z * sin_x),
        (sin_z * cos_y, sin_z * sin_y * sin_x + cos_z * cos_x, sin_z * sin_y * cos_x - cos_z * sin_x),
        (-sin_y, cos_y * sin_x, cos_y * cos_x),
    )
    return torch.stack([torch.stack(row, dim=-1) for row in rows], dim=-2)


def angles_of(matrices: torch.Tensor) -> torch.Tensor:
    """(..., 3, 3) -> (..., 3). Where only first and last angle together are determined, the last one is 0."""
    cosine = torch.hypot(matrices[..., 0, 0], matrices[..., 1, 0])
    locked = cosine < _LOCKED
    first = torch.atan2(matrices[..., 2, 1], matrices[..., 2, 2])
    first = torch.where(locked, torch.atan2(-matrices[..., 1, 2], matrices[..., 1, 1]), first)
    second = torch.atan2(-matrices[..., 2, 0], cosine)
    last = torch.atan2(matrices[..., 1, 0], matrices[..., 0, 0]).masked_fill(locked, 0.0)
    return torch.stack([first, second, last], dim=-1)
