"""Mixtures of experts as several families publish them: a matrix of each expert, and a gate with a bias."""

from typing import Final

from tests.tiny.model import EXPERTS, HIDDEN, Draw, Tensors

SIZE: Final = 64
"""The width of an expert."""


def gate(draw: Draw, layer: int, *, bias: bool = True) -> Tensors:
    """The gate; its bias changes which experts are chosen, not their weights."""
    at = f"model.layers.{layer}.mlp.gate"
    found = {f"{at}.weight": draw.matrix(EXPERTS, HIDDEN)}
    return found | ({f"{at}.e_score_correction_bias": draw.bias(EXPERTS)} if bias else {})


def experts(draw: Draw, layer: int, *, shared: bool = False) -> Tensors:
    """The experts, and the one that all tokens share."""
    names = [f"experts.{expert}" for expert in range(EXPERTS)] + (["shared_experts"] if shared else [])
    found: Tensors = {}
    for name in names:
        at = f"model.layers.{layer}.mlp.{name}"
        found |= {
            f"{at}.gate_proj.weight": draw.matrix(SIZE, HIDDEN),
            f"{at}.up_proj.weight": draw.matrix(SIZE, HIDDEN),
            f"{at}.down_proj.weight": draw.matrix(HIDDEN, SIZE),
        }
    return found
