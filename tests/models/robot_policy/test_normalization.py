"""Statistics of checkpoints: robot units to the model's numbers, and back."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.checkpoints.files import CheckpointError
from models.robot_policy.normalization import Normalization
from shared.errors import ClientError
from tests.tiny import pi

STATS = {name: np.array(values, np.float32) for name, values in pi.statistics().items()}
STATE = np.array([0.3, -2.0, 0.9, 4.0, 0.0], np.float32)
ACTIONS = np.linspace(-1.5, 1.5, 16, dtype=np.float32).reshape(2, 8)


def test_quantiles_of_lerobot_map_the_bounds_to_one() -> None:
    found = Normalization.read(pi.tiny_pi05(), quantiles=True)
    low, high = STATS["observation.state.q01"], STATS["observation.state.q99"]
    np.testing.assert_array_equal(found.normalized(low), -np.ones(5, np.float32))
    np.testing.assert_allclose(found.normalized(high), 1, rtol=1e-6)
    np.testing.assert_allclose(found.normalized(STATE), 2 * (STATE - low) / (high - low) - 1, rtol=1e-6)
    restored = found.restored(ACTIONS)
    low, high = STATS["action.q01"], STATS["action.q99"]
    np.testing.assert_allclose(restored[:, :7], (ACTIONS[:, :7] + 1) / 2 * (high - low) + low, rtol=1e-5)
    np.testing.assert_array_equal(restored[:, 7:], ACTIONS[:, 7:], "padding is left as it is")


def test_mean_and_deviation_of_lerobot() -> None:
    found = Normalization.read(pi.lerobot_pi0(), quantiles=False)
    mean, std = STATS["observation.state.mean"], STATS["observation.state.std"]
    np.testing.assert_allclose(found.normalized(STATE), (STATE - mean) / std, rtol=1e-6)
    restored = found.restored(ACTIONS)[:, :7]
    np.testing.assert_allclose(
        restored, ACTIONS[:, :7] * STATS["action.std"] + STATS["action.mean"], rtol=1e-5
    )


def openpi(folder: Path, padding: int = 0) -> Path:
    def padded(name: str) -> list[float]:
        return [*pi.statistics()[name], *[0.0] * padding]

    stats = {
        ours: {kind: padded(f"{name}.{kind}") for kind in ("mean", "std", "q01", "q99")}
        for ours, name in (("state", "observation.state"), ("actions", "action"))
    }
    (folder / "assets/droid").mkdir(parents=True)
    (folder / "assets/droid/norm_stats.json").write_text(json.dumps({"norm_stats": stats}))
    return folder


@pytest.mark.parametrize("padding", [0, 3])
def test_statistics_of_openpi_are_found_below_assets(tmp_path: Path, padding: int) -> None:
    found = Normalization.read(openpi(tmp_path, padding), quantiles=True)
    low, high = STATS["observation.state.q01"], STATS["observation.state.q99"]
    expected = (STATE - low) / (high - low + 1e-6) * 2 - 1
    np.testing.assert_allclose(found.normalized(STATE), expected, rtol=1e-6)
    low, high = STATS["action.q01"], STATS["action.q99"]
    restored = found.restored(ACTIONS)[:, :7]
    np.testing.assert_allclose(restored, (ACTIONS[:, :7] + 1) / 2 * (high - low + 1e-6) + low, rtol=1e-5)
    standard = Normalization.read(tmp_path, quantiles=False).normalized(STATE)
    mean, std = STATS["observation.state.mean"], STATS["observation.state.std"]
    np.testing.assert_allclose(standard, (STATE - mean) / (std + 1e-6), rtol=1e-6)


def test_statistics_of_several_data_sets_are_refused(tmp_path: Path) -> None:
    openpi(tmp_path)
    (tmp_path / "assets/aloha").mkdir()
    (tmp_path / "assets/aloha/norm_stats.json").write_text("{}")
    with pytest.raises(CheckpointError, match="statistics of 2 data sets"):
        Normalization.read(tmp_path, quantiles=True)


def test_statistics_of_the_processor_of_transformers(tmp_path: Path) -> None:
    stats: dict[str, Any] = {"state_mean": [1.0], "state_std": [2.0], "actions_mean": None}
    (tmp_path / "processor_config.json").write_text(json.dumps(stats))
    found = Normalization.read(tmp_path, quantiles=False)
    np.testing.assert_array_equal(found.normalized(np.array([5.0], np.float32)), [2.0])
    np.testing.assert_array_equal(found.restored(ACTIONS), ACTIONS)


def test_without_statistics_numbers_are_the_models() -> None:
    found = Normalization.read(pi.tiny_pi0(), quantiles=True)
    np.testing.assert_array_equal(found.normalized(STATE), STATE)
    np.testing.assert_array_equal(found.restored(ACTIONS), ACTIONS)


def test_a_state_of_another_length_is_refused() -> None:
    found = Normalization.read(pi.tiny_pi05(), quantiles=True)
    for length in (4, 6):
        with pytest.raises(ClientError, match=rf"robot_state: expected 5 numbers.*found {length}"):
            found.normalized(np.zeros(length, np.float32))
