"""Pi0.5 against a plain restatement, and its adaptive norms against Gemma's."""

from functools import cache
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers.models.gemma.modeling_gemma import GemmaDecoderLayer, GemmaRMSNorm

import models.pi05.nodes as pi05
from models.pi05.adaptive import AdaptiveLayer, AdaptiveNorm
from models.programs import Mask
from tests.models.pi05 import restatement
from tests.models.robot_policy import naive
from tests.tiny import pi

IDS = [2, 9, 77, 8, 130, 131]
NO_STATE = torch.zeros(0)


@cache
def case() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "pixels": random(3, 3, pi.IMAGE_SIZE, pi.IMAGE_SIZE),
        "noise": random(pi.HORIZON, pi.ACTION_DIM),
    }


@cache
def tensors() -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = load_file(pi.tiny_pi05() / "model.safetensors")
    return found


@cache
def nodes() -> Any:
    return naive.load(pi05, pi.tiny_pi05())


def found(*, ids: list[int] = IDS, run: Any = None, **changed: torch.Tensor) -> torch.Tensor:
    encoder, node = nodes()
    driver = naive.driver(encoder, node, ids=ids, state=NO_STATE, **(case() | changed))
    return naive.run(node, driver, **(run or {}))


def expected(*, ids: list[int] = IDS, **changed: torch.Tensor) -> torch.Tensor:
    given = case() | changed
    return restatement.sample_actions(tensors(), given["pixels"], ids, given["noise"], pi.STEPS)


def test_the_actions_are_those_of_the_restatement() -> None:
    torch.testing.assert_close(found(), expected(), rtol=0, atol=5e-5)


@pytest.mark.parametrize("name", ["pixels", "noise", "ids"])
def test_every_input_matters(name: str) -> None:
    changed: dict[str, Any] = {name: IDS[::-1]} if name == "ids" else {name: -case()[name]}
    assert (expected(**changed) - expected()).abs().max() > 0.01
    torch.testing.assert_close(found(**changed), expected(**changed), rtol=0, atol=5e-5)


@pytest.mark.parametrize("wrong", [{"mask": Mask.CAUSAL}, {"shift": 1}], ids=["mask", "positions"])
def test_another_mask_or_other_positions_would_be_seen(wrong: dict[str, Any]) -> None:
    assert (found(run=wrong) - expected()).abs().max() > 0.002


def test_conditions_of_several_times_are_each_those_of_the_restatement() -> None:
    _, node = nodes()
    times = torch.tensor([1.0, 0.75, 0.1])
    own = node.expert.condition(times)
    for time, one in zip(times, own, strict=True):
        torch.testing.assert_close(one, restatement.condition(tensors(), time), rtol=0, atol=1e-5)
    assert (own[0] - own[2]).abs().max() > 0.1


def test_an_adaptive_norm_with_zero_condition_equals_the_norm_of_gemma() -> None:
    adaptive, plain = AdaptiveNorm(24, 1e-6), GemmaRMSNorm(24, 1e-6)
    torch.nn.init.zeros_(adaptive.dense.bias)
    hidden, nothing = torch.randn(5, 24, generator=torch.Generator().manual_seed(2)), torch.zeros(5, 24)
    normed, gate = adaptive(hidden, adaptive.dense(nothing))
    torch.testing.assert_close(normed, plain(hidden), rtol=0, atol=1e-6)
    assert not gate.any()
    adaptive.dense.bias.data[:24] = plain.weight.data[:] = torch.linspace(-0.5, 0.5, 24)
    torch.testing.assert_close(adaptive(hidden, adaptive.dense(nothing))[0], plain(hidden), rtol=0, atol=1e-6)


def test_an_adaptive_layer_with_open_gates_is_a_layer_of_gemma() -> None:
    _, node = nodes()
    config = node.expert.network.config
    torch.manual_seed(0)
    adaptive, plain = AdaptiveLayer(config, 0).eval(), GemmaDecoderLayer(config, 0).eval()
    adaptive.self_attn.load_state_dict(plain.self_attn.state_dict())
    adaptive.mlp.load_state_dict(plain.mlp.state_dict())
    for norm in (adaptive.input_layernorm, adaptive.post_attention_layernorm):
        torch.nn.init.zeros_(norm.dense.bias)
        norm.dense.bias.data[-config.hidden_size :] = 1.0
    hidden, positions = torch.randn(1, 5, config.hidden_size), torch.arange(5)[None]
    rope = node.expert.network.dit.rotary_emb(hidden, position_ids=positions)
    given = {"position_embeddings": rope, "attention_mask": None}
    naive.alone()
    nothing = torch.zeros(1, config.hidden_size)
    own = adaptive(hidden, nothing, torch.zeros(5, dtype=torch.int64), **given)
    torch.testing.assert_close(own, plain(hidden, **given), rtol=0, atol=1e-6)


def test_in_bfloat16_the_flow_stays_in_float32() -> None:
    encoder, node = naive.load(pi05, pi.tiny_pi05(), dtype="bfloat16")
    network = node.expert.network
    assert node.dtype == node.expert.dtype == torch.bfloat16
    kept = (network.action_in_proj, network.action_out_proj, network.time_mlp_in, network.dit.norm.dense)
    assert {one.weight.dtype for one in kept} == {torch.float32}
    found = naive.run(node, naive.driver(encoder, node, ids=IDS, state=NO_STATE, **case()))
    assert found.dtype == torch.float32
    assert (found - expected()).abs().mean() < 0.2 * expected().abs().mean()
