"""Poses behind actions against recordings of the published code, which uses SciPy's rotations."""

import numpy as np
import torch

from models.vjepa2_ac.poses import angles_of, matrices_of, moved
from tests.models.vjepa2_ac import cases
from tests.models.vjepa2_ac.served import PUBLISHED


def test_poses_are_the_published_ones() -> None:
    poses, actions = cases.movements()

    found = moved(torch.from_numpy(poses), torch.from_numpy(actions)).numpy()

    np.testing.assert_allclose(found, PUBLISHED["poses"], rtol=1e-4, atol=1e-5)
    assert np.abs(found - poses).max() > 1


def test_a_locked_rotation_is_kept_although_its_angles_are_not() -> None:
    matrix = matrices_of(torch.tensor([0.4, np.pi / 2, -0.7], dtype=torch.float64))

    again = angles_of(matrix)

    assert again[2] == 0
    torch.testing.assert_close(matrices_of(again), matrix, atol=1e-7, rtol=0)
