"""Requests of V-JEPA 2-AC: the walk of each, what the CPU node makes of it, and what is refused."""

import pickle
import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from configs.checks import resolve
from models import registry
from models.checkpoints.files import CheckpointError
from models.checkpoints.progress import silent
from models.options import check
from models.vjepa2_ac import nodes, processing
from models.vjepa2_ac.graph import GRAPH
from models.vjepa2_ac.options import VJepa2AcOptions
from models.vjepa2_ac.settings import AcSettings
from models.vjepa2_ac.weights import for_transformers, read_part
from shared.errors import ClientError
from shared.events import Inputs, Limits, Params
from shared.plans import PlanRequest, Walk
from tests.models.vjepa2 import oracle
from tests.tiny.vjepa2_ac import FILE, tensors, tiny_vjepa2_ac

STEP = [0.1] * 7
POSE = {"states": [STEP]}


def steps(count: int) -> dict[str, Any]:
    return {"actions": [STEP] * count, "states": [STEP] * count}


def prepared(options: dict[str, Any], *, files: int = 1, kv_tokens: int = 10_000, **more: Any) -> Any:
    folder = tiny_vjepa2_ac(extrinsics=more.pop("extrinsics", False))
    loaded = processing.load(folder, max_seq_len=more.pop("max_seq_len", 4096), media=oracle.reader())
    args = {
        "inputs": Inputs(text="", files=[oracle.medium("clip"), oracle.medium("other")][:files]),
        "options": msgspec.convert(options, VJepa2AcOptions),
        "kv_tokens": kv_tokens,
    }
    return loaded.run("prepare", "k", {}, msgspec.msgpack.decode(msgspec.msgpack.encode(args)))


def asked(options: dict[str, Any], *, files: int = 1) -> Any:
    limits = Limits(max_seq_len=512, kv_tokens=900, default_max_tokens=1)
    inputs = Inputs(text="", files=[oracle.medium("clip")] * files)
    request = PlanRequest(
        request_id="r", inputs=inputs, params=Params(options=options), limits=limits, seed=0
    )
    walk = next(GRAPH.plan(request))
    assert isinstance(walk, Walk)
    return walk


@pytest.mark.parametrize(
    ("options", "files", "walk", "program"),
    [
        ({"skip_predictor": True, "mpc": True}, 1, "encode", None),
        (steps(4), 1, "predict", None),
        ({**steps(4), "rollout_horizon": 1}, 1, "predict", None),
        ({**steps(4), "rollout_horizon": 2}, 1, "rollout", "rollout"),
        ({**steps(4), "rollout_horizon": 2, "stream_rollout": True}, 1, "rollout_streamed", "rollout"),
        ({**steps(4), "rollout_horizon": 2, "mpc": True}, 1, "score", None),
        ({**POSE, "cem": True}, 2, "plan_to_file", "mpc"),
        ({**POSE, "cem": True, "goal_hidden_fill": 0.0}, 1, "plan", "mpc"),
    ],
)
def test_options_choose_the_walk(options: dict[str, Any], files: int, walk: str, program: str | None) -> None:
    found = asked(options, files=files)

    assert (found.name, found.args.get("program")) == (walk, program)


def test_the_arguments_of_a_plan_are_the_published_defaults() -> None:
    found = asked({**POSE, "cem": True}, files=2).args

    assert (found["samples"], found["topk"], found["cem_steps"], found["horizon"]) == (400, 10, 10, 2)
    assert (found["momentum_mean"], found["momentum_std"], found["maxnorm"]) == (0.15, 0.15, 0.05)


@pytest.mark.parametrize(
    ("options", "shapes"),
    [
        ({"skip_predictor": True}, {"pixels": (8, 3, 64, 64)}),
        (steps(4), {"pixels": (8, 3, 64, 64), "controls": (1, 4, 14)}),
        ({**steps(2), "num_frames": 5}, {"pixels": (4, 3, 64, 64), "controls": (1, 2, 14)}),
        ({**steps(9), "rollout_horizon": 3}, {"pixels": (1, 3, 64, 64), "controls": (3, 14)}),
        (
            {"mpc": True, "actions": [[STEP] * 4] * 3, "states": [[STEP] * 4] * 3, "goal_hidden_fill": 1.5},
            {"pixels": (8, 3, 64, 64), "controls": (3, 4, 14), "goal_hidden": (1, 64, 48)},
        ),
        (
            {**POSE, "cem": True, "goal_hidden": [[0.5] * 48] * 16},
            {"pixels": (1, 3, 64, 64), "controls": (1, 7), "goal_hidden": (1, 16, 48)},
        ),
    ],
)
def test_a_request_becomes_arrays(options: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> None:
    found = prepared(options)

    assert {name: array.shape for name, array in found.outputs.items()} == shapes
    assert {array.dtype for array in found.outputs.values()} == {np.dtype(np.float32)}
    assert found.facts["latents"] == max(1, shapes["pixels"][0] // 2) * 16


def test_a_plan_to_a_file_encodes_both() -> None:
    found = prepared({**POSE, "cem": True}, files=2)

    assert found.outputs["pixels"].shape == (2, 3, 64, 64)
    assert not np.array_equal(*found.outputs["pixels"])


def test_cameras_are_a_part_of_the_controls_of_a_checkpoint_that_takes_them() -> None:
    found = prepared({**steps(4), "extrinsics": [[0.5] * 6] * 4}, extrinsics=True)

    assert found.outputs["controls"].shape == (1, 4, 20)
    assert (found.outputs["controls"][..., 14:] == 0.5).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "actions: expected rows of 7 numbers.*found none"),
        ({**steps(4), "actions": [[1.0] * 6] * 4}, r"actions: expected rows of 7 numbers.*found the shape"),
        ({**steps(4), "actions": [STEP, [1.0]]}, "found rows of several lengths"),
        ({**steps(4), "states": [STEP] * 3}, r"states: expected as many as actions.*\(1, 3\)"),
        (steps(3), "actions: expected one for each 2 frames of the clip, 4, found 3"),
        ({**steps(4), "actions": [[1e39] * 7] * 4}, "actions: expected finite numbers"),
        ({"actions": [[STEP] * 4] * 2, "states": [[STEP] * 4] * 2}, "those of one candidate without mpc"),
        ({**steps(4), "extrinsics": [[1.0] * 6] * 4}, "extrinsics: expected none"),
        ({**steps(4), "rollout_horizon": 5}, "actions: expected at least 5 of one candidate"),
        ({**steps(4), "mpc": True}, "goal_hidden: expected rows of 48 numbers.*found none"),
        (
            {**steps(4), "mpc": True, "goal_hidden": [[1.0] * 48]},
            r"goal_hidden: expected the shape \(1, 64, 48\)",
        ),
        ({**steps(4), "cem": True}, "actions: expected none: they are planned"),
        ({"states": [STEP] * 2, "cem": True}, "states: expected one, the present pose"),
        ({**steps(4), "num_frames": 1}, "num_frames: expected 2 to 454 frames, found 0"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ClientError, match=message):
        prepared(options)


def test_a_rollout_that_does_not_fit_is_refused_before_a_file_is_read() -> None:
    with pytest.raises(
        ClientError, match=r"4 frames need 72 tokens of the KV cache, expected at most 71: .* 3"
    ):
        prepared({**steps(4), "rollout_horizon": 4}, kv_tokens=71, files=0)


@pytest.mark.parametrize(
    "options",
    [{"rollout_horizon": 65}, {"topk": 1}, {"maxnorm": 0}, {"momentum_std": 1.5}, {"actions": []}, {"k": 1}],
)
def test_options_out_of_their_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ClientError):
        check(VJepa2AcOptions, options)


@pytest.mark.parametrize(("options", "files"), [({}, 0), ({}, 2), ({"cem": True}, 1), ({"cem": True}, 3)])
def test_a_plan_takes_as_many_files_as_it_needs(options: dict[str, Any], files: int) -> None:
    with pytest.raises(ClientError, match="files: expected"):
        asked(options, files=files)


def test_more_winners_than_samples_are_refused() -> None:
    with pytest.raises(ClientError, match="topk: expected at most the number of samples, 5, found 6"):
        asked({**POSE, "cem": True, "samples": 5, "topk": 6}, files=2)


def test_a_folder_is_served_by_the_name_of_its_file(tmp_path: Path) -> None:
    (tmp_path / "vjepa2-ac-vitg.pt").touch()

    assert registry.family_of(tmp_path) == "vjepa2_ac"
    assert resolve(str(tmp_path)).max_seq_len == 16_384
    assert AcSettings.read(tmp_path).frame_tokens == 258


def load(folder: Path, node: str) -> Any:
    return nodes.load(folder, node, kwargs={}, device="cpu", dtype="auto", progress=silent)


@pytest.mark.parametrize("node", ["video_encoder", "rollout_predictor"])
def test_damaged_files_are_refused(node: str, tmp_path: Path) -> None:
    folder = tmp_path / "c"
    shutil.copytree(tiny_vjepa2_ac(), folder)
    whole = (folder / FILE).read_bytes()

    (folder / FILE).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="cannot be read"):
        load(folder, node)
    part = {"video_encoder": "encoder", "rollout_predictor": "predictor"}[node]
    torch.save({name: value for name, value in tensors().items() if name != part}, folder / FILE)
    with pytest.raises(CheckpointError, match=f"found no {part}"):
        load(folder, node)
    (folder / FILE).write_bytes(whole)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=f"the {part} does not have the sizes"):
        load(folder, node)
    (folder / FILE).unlink()
    with pytest.raises(CheckpointError, match=r"expected one file of weights.*found none"):
        load(folder, node)


class Runs:
    """A pickle that would run code."""

    def __reduce__(self) -> Any:
        return (Path.touch, (Path("ran"),))


def test_a_file_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / FILE).write_bytes(pickle.dumps({"encoder": Runs(), "predictor": Runs()}, protocol=2))

    with pytest.raises(CheckpointError, match="cannot be read"):
        read_part(tmp_path, "encoder")

    assert not (tmp_path / "ran").exists()


def test_a_file_with_transformers_names_is_read_as_well() -> None:
    ours = for_transformers(read_part(tiny_vjepa2_ac(), "encoder"))

    again = for_transformers(dict(ours))

    assert {*again} == {*ours}
    assert "layer.0.attention.query.weight" in ours
    assert "layer.0.norm1.weight" in ours
