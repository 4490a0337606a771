"""Experts, matrix by matrix: the same numbers and the same results as transformers' own modules."""

from typing import Any

import pytest
import torch

from models.transformers_lm.expert_layers import (
    PARTS,
    ExpertMatrix,
    all_chosen,
    experts_computed_by,
    experts_in,
    matrix_named,
    mlp_in,
)
from tests.workers.cpu_kernels import models

NAMES = ["qwen3_moe", "qwen2_moe", "mixtral"]


def layers_of(name: str) -> Any:
    return models.node(name).model.model.layers


@pytest.mark.parametrize("name", NAMES)
def test_each_expert_has_three_matrices(name: str) -> None:
    experts = layers_of(name)[0].mlp.experts
    gate, up, down = (ExpertMatrix(experts, 2, part).weight for part in PARTS)

    assert torch.equal(torch.cat([gate, up]), experts.gate_up_proj[2])
    assert torch.equal(down, experts.down_proj[2])
    assert ExpertMatrix(experts, 2, "up") == ExpertMatrix(experts, 2, "up") != ExpertMatrix(experts, 1, "up")


@pytest.mark.parametrize("name", NAMES)
def test_matrix_by_matrix_the_results_are_those_of_transformers(name: str) -> None:
    block = layers_of(name)[0].mlp
    states = torch.randn(1, 30, 80, generator=torch.Generator().manual_seed(1))
    seen: set[tuple[int, str]] = set()

    def multiply(matrix: ExpertMatrix, rows: torch.Tensor) -> torch.Tensor:
        seen.add((matrix.number, matrix.part))
        return torch.nn.functional.linear(rows, matrix.weight)

    expected = block(states)
    with experts_computed_by(multiply, [block.experts]):
        found = block(states)

    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert len(seen) == 3 * block.experts.num_experts
    assert torch.equal(block(states), expected)
    assert len(seen) == 3 * block.experts.num_experts


def test_all_experts_can_see_each_token() -> None:
    layers = layers_of("qwen3_moe")
    states = torch.randn(1, 1, 80)
    few = layers[0].mlp(states)

    with all_chosen(layers):
        assert layers[0].mlp.gate.top_k == 11
        assert not torch.allclose(layers[0].mlp(states), few)
    assert torch.equal(layers[0].mlp(states), few)


def test_a_layer_has_experts_an_mlp_or_both() -> None:
    first, second, _ = layers_of("qwen3_moe")
    assert (experts_in(first), mlp_in(first)) == (first.mlp.experts, None)
    assert (experts_in(second), mlp_in(second)) == (None, second.mlp)
    both = layers_of("qwen2_moe")[0]
    assert (experts_in(both), mlp_in(both)) == (both.mlp.experts, both.mlp.shared_expert)


@pytest.mark.parametrize(
    ("name", "file", "part"),
    [
        ("qwen3_moe", "model.layers.0.mlp.experts.10.up_proj", "up"),
        ("mixtral", "model.layers.0.block_sparse_moe.experts.3.w1", "gate"),
        ("mixtral", "model.layers.0.block_sparse_moe.experts.3.w2", "down"),
        ("mixtral", "model.layers.0.block_sparse_moe.experts.3.w3", "up"),
    ],
)
def test_a_matrix_is_found_by_its_name_in_files(name: str, file: str, part: str) -> None:
    found = matrix_named(models.node(name).model, file)

    assert (found.number, found.part) == (int(file.split(".")[5]), part)


def test_a_linear_layer_is_found_by_its_own_name() -> None:
    model = models.node("qwen3_moe").model

    assert matrix_named(model, "model.layers.1.mlp.up_proj") is model.model.layers[1].mlp.up_proj
    with pytest.raises(AttributeError):
        matrix_named(model, "model.layers.1.mlp.experts")
