from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig

from models.checkpoints.files import UnsupportedArchitectureError
from models.transformers_lm.loader import load_decoder
from models.transformers_lm.node import DecoderLM
from models.transformers_lm.sharding import Cut
from tests.peers import Circle, together
from tests.tiny import Family, tiny_checkpoint

SHARED: Sequence[Family] = ("llama", "qwen2", "qwen3", "phi3", "mixtral", "qwen3_moe", "glm4_lite")
"""Models without and with biases, head norms, concatenated outputs, and experts under two names."""


def logits_of(node: DecoderLM, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return node.reference(ids)


@pytest.mark.slow
@pytest.mark.parametrize("family", SHARED)
def test_members_come_to_what_the_whole_model_comes_to(family: Family) -> None:
    checkpoint = tiny_checkpoint(family)
    whole, members = load_decoder(checkpoint, "llm"), Circle(2).members()
    parts = [load_decoder(checkpoint, "llm", peers=member) for member in members]
    ids = torch.arange(7, 47) * 5 % whole.vocab_size

    expected = logits_of(whole, ids)
    found = together([partial(logits_of, part, ids) for part in parts])

    assert torch.allclose(found[0], expected, atol=1e-4 * float(expected.std()))
    assert torch.equal(found[0], found[1]), "what is added is the same for all of them, to the last bit"
    assert members[0].sums == 2 * whole.layout.layers, "one sum for attention, one for what is behind it"


@pytest.mark.slow
def test_each_member_reads_its_part_and_has_its_part_of_the_heads() -> None:
    read: list[int] = []
    checkpoint = tiny_checkpoint("qwen3")
    whole = load_decoder(checkpoint, "llm", progress=lambda done, total, _: read.append(total))
    [part, _] = [
        load_decoder(checkpoint, "llm", peers=member, progress=lambda done, total, _: read.append(total))
        for member in Circle(2).members()
    ]
    model: Any = whole.model
    shared = sum(parameter.numel() for parameter in model.model.layers.parameters() if parameter.ndim == 2)

    assert part.layout.kv_heads * 2 == whole.layout.kv_heads
    assert (part.layout.layers, part.layout.head_dim) == (whole.layout.layers, whole.layout.head_dim)
    assert part.parameters == whole.parameters - shared // 2
    assert read[-1] == read[0] - shared // 2 * 4, "float32, and no more than that"


@pytest.mark.parametrize(
    ("size", "why"),
    [
        (
            3,
            r"LlamaForCausalLM cannot be shared .*q_proj is 64 wide, which does not divide by 3",
        ),
        (4, r"layers\.0\.self_attn\.k_proj has 2 heads, which do not divide by 4; choose another tp_size"),
    ],
)
def test_a_size_that_does_not_divide_is_refused(size: int, why: str) -> None:
    with pytest.raises(UnsupportedArchitectureError, match=why):
        load_decoder(tiny_checkpoint("llama"), "llm", peers=Circle(size).members()[0])


@pytest.mark.parametrize(
    ("config", "family", "plan", "why"),
    [
        (LlamaConfig, "llama", None, "transformers has no tensor-parallel plan for it"),
        (
            LlamaConfig,
            "llama",
            {"layers.*.self_attn": "unheard_of"},
            r"its plan asks for 'unheard_of' of layers\.0\.self_attn, which is not supported",
        ),
        (LlamaConfig, "llama", {"norm": "colwise"}, "norm is a LlamaRMSNorm: expected a plain Linear"),
        (
            Qwen3MoeConfig,
            "qwen3_moe",
            {"layers.*.mlp.experts": "moe_tp_experts", "layers.*.mlp.experts.down_proj": "rowwise"},
            r"experts\.gate_up_proj is whole in every member, and would be added by each",
        ),
    ],
)
def test_a_plan_that_is_not_understood_is_refused(
    monkeypatch: pytest.MonkeyPatch, config: Any, family: Family, plan: dict[str, str] | None, why: str
) -> None:
    monkeypatch.setattr(config, "base_model_tp_plan", plan)

    with pytest.raises(UnsupportedArchitectureError, match=why):
        load_decoder(tiny_checkpoint(family), "llm", peers=Circle(2).members()[0])


def test_a_cut_of_two_packed_matrices_has_a_part_of_each() -> None:
    packed = torch.arange(12)[:, None].expand(12, 5)

    assert Cut(-2, 1, 3, matrices=2).of(packed, (12, 5))[:, 0].tolist() == [2, 3, 8, 9]
    assert Cut(-2, 1, 3).of(packed, (12, 5))[:, 0].tolist() == [4, 5, 6, 7]
    assert Cut(-1, 0, 2).of(packed[:, 0], (12,)).tolist() == [0, 1, 2, 3, 4, 5]
