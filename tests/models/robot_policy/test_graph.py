"""Graph, plan, claims and configurations of policies."""

import json
from pathlib import Path
from typing import Any

import pytest

import models.pi05.nodes as pi05
from configs import files
from models import registry
from models.checkpoints.claims import CheckpointInfo
from models.checkpoints.files import CheckpointError, UnsupportedArchitectureError
from models.pi0.graph import GRAPH as PI0
from models.pi05.graph import GRAPH as PI05
from models.robot_policy.settings import PolicySettings
from models.robot_policy.tensor_names import place_of
from shared.errors import ClientError
from shared.events import Inputs, Limits, Media, Params
from shared.plans import PlanRequest, Walk
from tests.models.robot_policy import naive
from tests.tiny import pi

IMAGE = Media(modality="image", digest="0" * 64, size=1)


def request(**inputs: Any) -> PlanRequest:
    params = Params(options={"robot_state": [0.0]})
    return PlanRequest(
        request_id="r",
        inputs=Inputs(**inputs),
        params=params,
        limits=Limits(max_seq_len=64, kv_tokens=64, default_max_tokens=8),
        seed=1,
    )


def test_a_plan_is_one_walk_of_the_program() -> None:
    step = next(PI05.plan(request(text="fold", files=[IMAGE])))
    assert isinstance(step, Walk)
    assert step.name == "act"
    assert isinstance(step.args, dict)
    assert step.args["program"] == "actions"


@pytest.mark.parametrize("inputs", [{"text": "fold"}, {"messages": [{"role": "user", "content": "x"}]}])
def test_a_request_needs_one_text_and_files(inputs: dict[str, Any]) -> None:
    with pytest.raises(ClientError):
        next(PI05.plan(request(**inputs)))


@pytest.mark.parametrize(
    ("folder", "family"), [("tiny_pi0", "pi0"), ("lerobot_pi0", "pi0"), ("tiny_pi05", "pi05")]
)
def test_folders_are_claimed(folder: str, family: str) -> None:
    path = getattr(pi, folder)()
    assert registry.family_of(path) == family
    other = PI0 if family == "pi05" else PI05
    assert other.claims is not None
    assert other.claims(CheckpointInfo.read(path)) is None


def test_a_deployment_may_change_the_horizon() -> None:
    _, node = naive.load(pi05, pi.tiny_pi05(), action_horizon=3, num_flow_steps=2)
    assert (node.expert.settings.horizon, node.expert.settings.steps) == (3, 2)
    with pytest.raises(CheckpointError, match="expected an integer from 1 to 1024 in action_horizon"):
        naive.load(pi05, pi.tiny_pi05(), action_horizon=0)


@pytest.mark.parametrize("name", ["pi05", "pi05_droid"])
def test_the_published_configurations_are_placements(name: str, tmp_path: Path) -> None:
    text = (Path(files.__file__).parent / f"{name}.yaml").read_text()
    assert "vit_encoder" in text
    assert ("action_horizon: 15" in text) is (name == "pi05_droid")


def test_a_checkpoint_is_examined_without_its_weights() -> None:
    assert pi05.examine(pi.tiny_pi05(), "LLM") == 8192


def test_relative_actions_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"use_relative_actions": True}))
    with pytest.raises(UnsupportedArchitectureError, match="use_relative_actions"):
        PolicySettings.read(tmp_path, max_tokens=8)


@pytest.mark.parametrize(
    ("stored", "place"),
    [
        ("model.paligemma_with_expert.paligemma.lm_head.weight", "prefix.lm_head.weight"),
        ("paligemma_with_expert.gemma_expert.model.norm.dense.bias", "expert.dit.norm.dense.bias"),
        ("paligemma_with_expert.gemma_expert.lm_head.weight", ""),
        ("model.dit.embed_tokens.weight", ""),
        ("model.vlm.language_model.norm.weight", "prefix.model.language_model.norm.weight"),
        ("embed_action_time.state_proj.bias", "expert.state_proj.bias"),
        ("model.time_mlp_in.weight", "expert.time_mlp_in.weight"),
    ],
)
def test_tensors_of_all_layouts_have_a_place(stored: str, place: str) -> None:
    assert place_of(stored) == place
