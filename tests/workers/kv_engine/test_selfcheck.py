"""No engine is made of a model whose logits over the pool differ."""

import pytest
import torch

from models.checkpoints.files import UnsupportedArchitectureError
from models.decoder_lm import nodes
from models.decoder_lm.nodes import DecoderLM, load
from tests.tiny import FAMILIES, Family, tiny_checkpoint
from workers.kv_engine.attention.paged import ATTENTION
from workers.kv_engine.selfcheck import check_node

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_served_families_pass(family: Family, dtype: str) -> None:
    node = load(tiny_checkpoint(family), dtype=dtype)
    node.use_attention(ATTENTION)

    check_node(node)


class ScaledHead(DecoderLM):
    """A head with scaled logits, as Granite and Cohere have it, that differs from the reference."""

    def head(self, hidden: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        return super().head(hidden, indices) / 4


class OwnPositions(DecoderLM):
    """A model that counts its own positions, from the start of the batch."""

    def forward(self, inputs: torch.Tensor, step: nodes.TokenStep) -> torch.Tensor:
        class Wrong:
            token_ids = step.token_ids
            positions = torch.arange(len(inputs))
            routes = None
            long_factors = None

        return super().forward(inputs, Wrong())


class WrongRow(DecoderLM):
    """A model that is wrong for a step of one row, for which kernels may have another path."""

    def forward(self, inputs: torch.Tensor, step: nodes.TokenStep) -> torch.Tensor:
        hidden = super().forward(inputs, step)
        return hidden.flip(-1) if len(hidden) == 1 else hidden


class WrongPair(DecoderLM):
    """A model that is wrong for decodes alone of several sequences."""

    def forward(self, inputs: torch.Tensor, step: nodes.TokenStep) -> torch.Tensor:
        hidden = super().forward(inputs, step)
        return hidden.flip(-1) if len(hidden) == 2 else hidden


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("broken", [ScaledHead, OwnPositions, WrongRow, WrongPair])
def test_a_model_with_an_unsupported_feature_is_refused_by_name(
    broken: type[DecoderLM], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = load(tiny_checkpoint("llama"), dtype=dtype)
    node.use_attention(ATTENTION)
    monkeypatch.setattr(node, "__class__", broken)

    with pytest.raises(UnsupportedArchitectureError, match="LlamaForCausalLM is not served"):
        check_node(node)


def test_a_model_that_cannot_run_over_the_pool_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    node = load(tiny_checkpoint("llama"))
    node.use_attention(ATTENTION)

    def stumble(hidden: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        raise AttributeError("no last_hidden_state")

    monkeypatch.setattr(node, "head", stumble)

    with pytest.raises(
        UnsupportedArchitectureError, match=r"LlamaForCausalLM is not served: it cannot .*state"
    ):
        check_node(node)
