"""Temperature, min-p, top-k and top-p cut off the tokens that they are said to cut off."""

from typing import Any

import pytest
import torch

from models.diffusion_text.filters import filtered_logits
from models.sequence_request import SamplingParams

CHANCES = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.05, 0.15, 0.3, 0.5]])


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({}, 4),
        ({"top_k": 2}, 2),
        ({"top_k": 0}, 4),
        ({"top_k": 9}, 4),
        ({"top_p": 0.6}, 2),
        ({"top_p": 0.01}, 1),
        ({"top_p": 1.0}, 4),
        ({"min_p": 0.2}, 3),
        ({"min_p": 1.0}, 1),
        ({"min_p": 0.2, "top_k": 2}, 2),
        ({"temperature": 0.5, "min_p": 0.2}, 2),
    ],
)
def test_the_likeliest_tokens_are_kept_at_each_place(params: dict[str, Any], kept: int) -> None:
    found = filtered_logits(CHANCES.log(), SamplingParams(**params)).softmax(-1)

    assert (found > 0).sum(-1).tolist() == [kept, kept]
    best = CHANCES[0].clone().pow(1 / params.get("temperature", 1.0))
    best[kept:] = 0
    assert torch.allclose(found[0], best / best.sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [1e-40, 5e-324])
def test_the_least_temperature_leaves_the_likeliest_token(temperature: float, dtype: torch.dtype) -> None:
    found = filtered_logits(CHANCES.log().to(dtype), SamplingParams(temperature=temperature)).softmax(-1)

    assert found.tolist() == [[1, 0, 0, 0], [0, 0, 0, 1]]
