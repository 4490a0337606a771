"""The CPU nodes of policies: observations to inputs of the model, and actions to the robot's units."""

from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from models import registry
from models.media.in_process import InProcessReader
from models.robot_policy.images import image_of, pixels_of
from models.robot_policy.prompts import bins_of, instruction_prompt, state_prompt
from shared.errors import ClientError
from shared.tensors import Handle
from tests.models.robot_policy.observations import (
    DROID,
    LEROBOT,
    LIBERO,
    OPENPI,
    STATE,
    npz,
    picture,
    png,
    prepared,
)
from tests.tiny import pi


def text_of(result: Any) -> str:
    tokenizer = Tokenizer.from_file(str(pi.tiny_pi05() / "tokenizer.json"))
    ids = np.frombuffer(result.outputs["token_ids"].data, np.int32).tolist()
    assert ids[0] == tokenizer.token_to_id("<bos>")
    found: str = tokenizer.decode(ids[1:])
    return found


# ---- prompts ---------------------------------------------------------------------------------------
def test_states_are_numbers_of_256_bins() -> None:
    values = np.array([-1.5, -1.0, -0.9921875, 0.0, 0.999, 1.0, 7.0], np.float32)
    assert bins_of(values) == [-1, 0, 1, 128, 255, 255, 255]


def test_the_prompt_of_pi05_is_that_of_openpi() -> None:
    text = state_prompt("  pick up_the\ncup ", np.array([0.0, 1.0], np.float32))
    assert text == "Task: pick up the cup, State: 128 255;\nAction: "


def test_the_prompt_of_pi0_ends_with_a_line_break() -> None:
    assert instruction_prompt(" fold_it\n", np.zeros(1, np.float32)) == "fold it\n"


# ---- images ----------------------------------------------------------------------------------------
def test_an_image_of_the_models_size_is_only_scaled() -> None:
    pixels = pixels_of(picture(1), 28)
    np.testing.assert_allclose(pixels, picture(1).transpose(2, 0, 1) / 255.0 * 2 - 1, atol=1e-6)


def test_another_image_is_fitted_between_black_borders() -> None:
    pixels = pixels_of(np.full((20, 80, 3), 255, np.uint8), 28)
    assert pixels.shape == (3, 28, 28)
    rows = pixels.mean((0, 2))
    assert rows.tolist() == [-1.0] * 10 + [1.0] * 7 + [-1.0] * 11


def test_floats_and_channels_first_are_images_too() -> None:
    wanted = picture(2)
    np.testing.assert_array_equal(image_of("a", wanted.transpose(2, 0, 1)), wanted)
    found = image_of("a", (wanted / 255.0).astype(np.float32))
    assert np.abs(found.astype(int) - wanted).max() <= 1
    for wrong in (np.zeros((4, 4), np.uint8), np.zeros((4, 4, 3), np.int64), np.zeros((0, 4, 3), np.uint8)):
        with pytest.raises(ClientError, match="a: expected an image"):
            image_of("a", wrong)


# ---- requests --------------------------------------------------------------------------------------
def test_pi05_has_its_normalized_state_in_the_prompt() -> None:
    result = prepared("pi05", [png(1), png(2)], robot_state=STATE)
    low, high = (np.array(pi.statistics()[f"observation.state.{q}"]) for q in ("q01", "q99"))
    bins = bins_of((2 * (np.array(STATE) - low) / (high - low) - 1).astype(np.float32))
    assert text_of(result) == f"Task: pick up the cup, State: {' '.join(map(str, bins))};\nAction: "
    assert result.outputs["state"].shape == (0,)
    assert result.outputs["pixels"].shape == (2, 3, 28, 28)
    assert len(set(bins)) > 3


def test_pi0_has_its_normalized_state_beside_the_prompt() -> None:
    result = prepared("pi0", [png(1)], robot_state=STATE)
    mean, std = (np.array(pi.statistics()[f"observation.state.{q}"]) for q in ("mean", "std"))
    assert text_of(result) == "pick up the cup\n"
    np.testing.assert_allclose(result.outputs["state"][:5], (np.array(STATE) - mean) / std, rtol=1e-5)
    assert result.outputs["state"].tolist()[5:] == [0, 0, 0]


@pytest.mark.parametrize(
    ("arrays", "cameras"),
    [
        ({**LEROBOT, "observation.state": np.array(STATE)}, 3),
        ({**OPENPI, "state": np.array(STATE)}, 2),
        (DROID, 2),
        ({**LIBERO, "observation/state": np.array(STATE)}, 2),
    ],
    ids=["lerobot", "openpi", "droid", "libero"],
)
def test_observations_of_known_robots_are_those_of_files_and_options(arrays: Any, cameras: int) -> None:
    found = prepared("pi05", [npz(**arrays)])
    expected = prepared("pi05", [png(n) for n in range(cameras)], robot_state=STATE)
    assert text_of(found) == text_of(expected)
    np.testing.assert_array_equal(found.outputs["pixels"], expected.outputs["pixels"])


@pytest.mark.parametrize(
    ("files", "options", "message"),
    [
        ([npz(other=np.zeros(3))], {}, "no camera that is known"),
        ([npz(**LIBERO)], {}, "observation/state: expected the robot's state"),
        ([png(1)], {}, "robot_state: expected the robot's state"),
        ([png(1)], {"robot_state": [0.0, float("nan"), 0.0, 0.0, 0.0]}, "expected finite numbers"),
        ([png(1)], {"robot_state": [0.0] * 9}, "robot_state: expected at most 8 numbers, found 9"),
        ([png(1)], {"robot_state": [0.0] * 4}, "robot_state: expected 5 numbers"),
        ([png(n) for n in range(4)], {"robot_state": STATE}, "expected at most 3 images"),
        ([png(1), npz(**DROID)], {}, "one file of arrays alone"),
    ],
)
def test_what_is_no_observation_is_refused(files: Any, options: Any, message: str) -> None:
    with pytest.raises(ClientError, match=message):
        prepared("pi05", files, **options)


def test_a_prompt_that_is_too_long_is_refused() -> None:
    with pytest.raises(ClientError, match="context length is 200 tokens"):
        prepared("pi05", [png(1)], "x y " * 400, robot_state=STATE)


def test_actions_are_in_the_units_of_the_robot_and_without_padding() -> None:
    processing = registry.load_processing("pi05", pi.tiny_pi05(), max_seq_len=64, media=InProcessReader({}))
    actions = np.linspace(-1, 1, 48, dtype=np.float32).reshape(6, 8)
    handles = {
        "actions": Handle(key="a", dtype="float32", shape=(6, 8), data=actions.tobytes()),
        "robot": Handle(key="r", dtype="int32", shape=(1,), data=np.array([7], np.int32).tobytes()),
    }
    found: Any = processing.run("denormalize", "k", handles, {}).outputs["action"]
    low, high = (np.array(pi.statistics()[f"action.{q}"]) for q in ("q01", "q99"))
    np.testing.assert_allclose(found, (actions[:, :7] + 1) / 2 * (high - low) + low, rtol=1e-4, atol=1e-6)
