"""V-JEPA 2 against transformers' own model: features, options, refusals."""

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from configs.checks import resolve
from models import registry
from models.base import Item
from models.checkpoints.files import CheckpointError
from models.checkpoints.progress import silent
from models.options import check
from models.vjepa2 import nodes, processing
from models.vjepa2.graph import GRAPH, VJepa2Options
from shared.errors import ClientError
from shared.events import Inputs, Limits, Params
from shared.plans import PlanRequest, Walk
from tests.models.vjepa2 import oracle
from tests.tiny.vjepa2 import tiny_vjepa2

MASKED = {"context_mask": [*range(32)], "target_mask": [*range(40, 64)]}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("clip", {}),
    ("clip", {"skip_predictor": True}),
    ("clip", MASKED),
    ("clip", {"num_frames": 4, "target_mask": [[3, 1, 30]]}),
    ("short", {"num_frames": 64, "skip_predictor": True}),
    ("picture", {"skip_predictor": True}),
    ("picture", {"num_frames": 2}),
]


def load(node: str) -> Any:
    return nodes.load(tiny_vjepa2(), node, kwargs={}, device="cpu", dtype="auto", progress=silent)


def prepared(name: str, options: dict[str, Any], max_seq_len: int = 8192) -> Item:
    loaded = processing.load(tiny_vjepa2(), max_seq_len=max_seq_len, media=oracle.reader())
    medium = oracle.medium(name)
    args = {"inputs": Inputs(text="", files=[medium]), "options": msgspec.convert(options, VJepa2Options)}
    wire = msgspec.msgpack.decode(msgspec.msgpack.encode(args)) | {"digest": medium.digest}
    result = loaded.run("prepare", "k", {}, wire)
    arrays = {edge: np.asarray(array) for edge, array in result.outputs.items()}
    assert result.facts["latents"] == len(arrays["pixels"]) // 2 * 16
    return Item(inputs={edge: torch.from_numpy(array) for edge, array in arrays.items()}, args=wire)


def pixels(name: str, options: dict[str, Any]) -> Item:
    """The item of the encoder."""
    item = prepared(name, options)
    return Item(inputs={"pixels": item.inputs["pixels"]}, args=item.args)


@torch.inference_mode()
def features(*cases: tuple[str, dict[str, Any]]) -> list[Any]:
    """The features of each case, computed in one batch where the nodes allow it."""
    encoder, predictor = load("video_encoder"), load("predictor")
    items = [prepared(*case) for case in cases]
    encoded = [result.outputs["features"] for result in encoder.run([pixels(*case) for case in cases])]
    if cases[0][1].get("skip_predictor"):
        return encoded
    masked = [
        Item(
            inputs={"features": rows, **{k: v for k, v in item.inputs.items() if k != "pixels"}},
            args=item.args,
        )
        for item, rows in zip(items, encoded, strict=True)
    ]
    assert len({predictor.group(item) for item in masked}) == 1
    return [result.outputs["predicted"] for result in predictor.run(masked)]


@pytest.mark.parametrize(("name", "options"), CASES)
def test_features_are_those_of_transformers(name: str, options: dict[str, Any]) -> None:
    [found] = features((name, options))

    expected = oracle.features(name, options)
    assert found.dtype == torch.float32
    assert found.shape == expected.shape
    assert np.abs(found.numpy() - expected).max() < 1e-4 * np.abs(expected).max()


def test_features_depend_on_the_video_and_on_the_masks() -> None:
    """Negative control: what the other tests compare is not constant."""
    clip, other = oracle.features("clip", {}), oracle.features("other", {})

    assert np.abs(clip - other).max() > 0.01 * np.abs(clip).max()
    late = oracle.features("clip", MASKED | {"context_mask": [*range(32, 64)]})
    assert np.abs(oracle.features("clip", MASKED) - late).max() > 0.01 * np.abs(late).max()


def test_clips_in_one_batch_give_the_features_of_each() -> None:
    found = features(("clip", {}), ("other", {}), ("clip", {}))

    for one, name in zip(found, ("clip", "other", "clip"), strict=True):
        expected = oracle.features(name, {})
        assert np.abs(one.numpy() - expected).max() < 1e-4 * np.abs(expected).max()


@torch.inference_mode()
def test_a_clip_is_encoded_once_whatever_is_predicted_of_it() -> None:
    encoder = load("video_encoder")

    first = encoder.run([pixels("clip", {})])
    again = encoder.run([pixels("clip", MASKED)])
    encoder.run([pixels("clip", {"num_frames": 4})])

    assert again[0].outputs["features"] is first[0].outputs["features"]
    assert (encoder.encoder_cache.counters.hits, encoder.encoder_cache.counters.misses) == (1, 2)


@torch.inference_mode()
def test_steps_of_a_rollout_are_those_of_the_published_one() -> None:
    """Two clips in one batch; the window of a step is what the step before has made of it."""
    encoder, node = load("video_encoder"), load("rollout_predictor")
    windows = [one.outputs["features"] for one in encoder.run([pixels("clip", {}), pixels("other", {})])]
    found: list[list[Any]] = [[], []]
    for _ in range(3):
        results = node.run([Item(inputs={"features": window}, args={}) for window in windows])
        windows = [result.outputs["features"] for result in results]
        for rows, result in zip(found, results, strict=True):
            rows.append(result.outputs["predicted"].numpy())

    for rows, name in zip(found, ("clip", "other"), strict=True):
        expected = oracle.rollout(name, 3)
        assert np.abs(np.concatenate(rows) - expected).max() < 1e-4 * np.abs(expected).max()
    first, *_, last = oracle.rollout("clip", 3)
    assert np.abs(first - last).max() > 1e-3 * np.abs(first).max(), "the window moves"


@pytest.mark.parametrize(
    ("options", "walk"),
    [
        ({"rollout_horizon": 1, "stream_rollout": True}, "predict"),
        ({"rollout_horizon": 2}, "rollout"),
        ({"rollout_horizon": 16, "stream_rollout": True}, "rollout_streamed"),
        ({"rollout_horizon": 2, "skip_predictor": True}, "encode"),
    ],
)
def test_options_choose_the_walk_as_ms_do(options: dict[str, Any], walk: str) -> None:
    inputs = Inputs(text="", files=[oracle.medium("clip")])

    asked = next(GRAPH.plan(plan_request(inputs, options)))

    assert isinstance(asked, Walk)
    assert asked.name == walk
    assert isinstance(asked.args, dict)
    assert asked.args.get("horizon") == (options["rollout_horizon"] if "rollout" in walk else None)


def test_a_rollout_without_its_node_is_refused() -> None:
    inputs = Inputs(text="", files=[oracle.medium("clip")])
    request = plan_request(inputs, {"rollout_horizon": 2}, absent=("rollout_predictor",))

    with pytest.raises(ClientError, match="this deployment has no node rollout_predictor"):
        next(GRAPH.plan(request))


def plan_request(inputs: Inputs, options: dict[str, Any], absent: tuple[str, ...] = ()) -> PlanRequest:
    limits = Limits(max_seq_len=64, kv_tokens=0, default_max_tokens=1, absent_nodes=absent)
    return PlanRequest(request_id="r", inputs=inputs, params=Params(options=options), limits=limits, seed=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rollout_horizon": 2, "num_frames": 2}, "rollout_horizon: expected a clip of at least 4 frames"),
        ({"target_mask": [64]}, "target_mask: expected numbers of latents, from 0 to 63"),
        ({"context_mask": [[]]}, "context_mask"),
        ({"num_frames": 1}, "num_frames: expected 1 to 8192 latents, found 0"),
    ],
)
def test_what_a_clip_does_not_have_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ClientError, match=message):
        prepared("clip", options)


def test_a_clip_of_too_many_latents_is_refused() -> None:
    with pytest.raises(ClientError, match="expected 1 to 63 latents, found 64"):
        prepared("clip", {}, max_seq_len=63)


@pytest.mark.parametrize(
    "options",
    [{"num_frames": 0}, {"context_mask": []}, {"target_mask": [-1]}, {"frames": 4}, {"rollout_horizon": 17}],
)
def test_wrong_options_are_refused_before_anything_runs(options: dict[str, Any]) -> None:
    with pytest.raises(ClientError):
        check(VJepa2Options, options)


@pytest.mark.parametrize(
    "inputs", [{"text": ""}, {"text": "What is it?", "files": 1}, {"text": "", "files": 2}]
)
def test_a_plan_takes_one_file_and_no_text(inputs: dict[str, Any]) -> None:
    files = [oracle.medium("clip")] * inputs.pop("files", 0)
    limits = Limits(max_seq_len=64, kv_tokens=0, default_max_tokens=1)
    request = PlanRequest(
        request_id="r", inputs=Inputs(**inputs, files=files), params=Params(), limits=limits, seed=0
    )

    with pytest.raises(ClientError, match="expected one video or image and no text"):
        next(GRAPH.plan(request))


def test_a_folder_is_served_by_its_architecture() -> None:
    assert registry.family_of(tiny_vjepa2()) == "vjepa2"
    assert resolve(str(tiny_vjepa2())).max_seq_len == 65_536


def test_a_checkpoint_without_a_part_or_with_wrong_settings_is_refused(tmp_path: Path) -> None:
    shutil.copytree(tiny_vjepa2(), tmp_path / "c")
    settings = tmp_path / "c" / "video_preprocessor_config.json"
    settings.write_text(json.dumps({"crop_size": 64, "size": {"shortest_edge": 32}}))
    with pytest.raises(CheckpointError, match="crop"):
        processing.load(tmp_path / "c", max_seq_len=64, media=oracle.reader())
    (tmp_path / "c" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="weights"):
        nodes.load(tmp_path / "c", "predictor", kwargs={}, device="cpu", dtype="auto", progress=silent)
