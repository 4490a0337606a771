"""Indexers over packed tokens: what they choose is what transformers' own method chooses."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers.models.deepseek_v32 import modeling_deepseek_v32
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa

from models.base import CellShape
from models.checkpoints.files import UnsupportedArchitectureError
from models.decoder_lm.nodes import examine, load
from models.transformers_lm import indexers
from models.transformers_lm.indexers import Indexed, choosing_all
from tests.tiny import Family, tiny_checkpoint
from workers.kv_engine.attention.paged import ATTENTION

FAMILIES: list[Family] = ["deepseek_v32", "glm_dsa"]
CLASSES = [
    ("deepseek_v32", modeling_deepseek_v32, "DeepseekV32Indexer"),
    ("glm_dsa", modeling_glm_moe_dsa, "GlmMoeDsaIndexer"),
]


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_with_an_indexer_store_its_keys_behind_their_own(family: Family) -> None:
    node = load(tiny_checkpoint(family))

    plain, indexed = CellShape(1, 32, 24, is_latent=True), CellShape(1, 52, 24, is_latent=True)
    assert node.layout.has_indexers
    assert [*node.layout.shapes] == (
        [indexed, indexed] if family == "deepseek_v32" else [indexed, indexed, plain, indexed]
    )


@pytest.mark.parametrize(("family", "module", "name"), CLASSES)
@pytest.mark.parametrize(
    "change",
    [
        lambda args: ((args[0].flip(1), *args[1:]), {}),
        lambda args: ((*args[:2], (args[2][1], args[2][0]), *args[3:]), {}),
    ],
)
def test_an_indexer_that_chooses_otherwise_is_refused_before_weights_are_read(
    family: Family, module: ModuleType, name: str, change: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: in another version of transformers the formula may be another one."""
    own = getattr(module, name).forward

    def other(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("past_key_values") is None and args[3].dtype == torch.bool:
            args, _ = change(args)
        return own(self, *args, **kwargs)

    other.__wrapped__ = own  # type: ignore[attr-defined] # the source of its rotation
    monkeypatch.setattr(getattr(module, name), "forward", other)

    with pytest.raises(
        UnsupportedArchitectureError, match=f"is not served: .*its {name} chooses other keys than"
    ):
        examine(tiny_checkpoint(family), "llm")


def test_an_unknown_rotation_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexers, "_ROTATIONS", ("apply_rotary_pos_emb",))

    with pytest.raises(UnsupportedArchitectureError, match=r"rotates queries by \['apply_rotary_pos_emb_"):
        examine(tiny_checkpoint("glm_dsa"), "llm")


def test_an_indexer_with_another_signature_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    own = modeling_deepseek_v32.DeepseekV32Indexer.forward

    def other(self: Any, hidden_states: Any) -> Any:
        return own(self, hidden_states)

    other.__wrapped__ = own  # type: ignore[attr-defined]
    monkeypatch.setattr(modeling_deepseek_v32.DeepseekV32Indexer, "forward", other)

    with pytest.raises(
        UnsupportedArchitectureError, match=r"cannot be computed over packed tokens \(TypeError"
    ):
        examine(tiny_checkpoint("deepseek_v32"), "llm")


def test_under_its_own_attention_an_indexer_computes_as_always() -> None:
    """The self-check compares with it."""
    node = load(tiny_checkpoint("deepseek_v32"))
    module = node.model.model.layers[0].self_attn.indexer
    given = (torch.randn(1, 12, 64), torch.randn(1, 12, 32), (torch.ones(1, 12, 8), torch.zeros(1, 12, 8)))
    seen = torch.ones(1, 12, 12, dtype=torch.bool).tril()

    chosen = module.forward(*given, seen, None)
    node.use_attention(ATTENTION)
    packed = module.forward(*given, seen, None)

    assert chosen.shape == (1, 12, 8)
    assert isinstance(packed, Indexed)
    assert (packed.layer, packed.top) == (0, 8)
    assert packed.queries.shape == (12, 4, 20)
    assert packed.keys.shape == (12, 20)


def test_all_keys_can_be_chosen_for_a_while() -> None:
    node = load(tiny_checkpoint("glm_dsa"))
    text = torch.arange(40)
    few = node.reference(text)

    with choosing_all(node.model):
        every = node.reference(text)

    assert torch.allclose(few[:8], every[:8], atol=1e-4)
    assert not torch.allclose(few[8:], every[8:], atol=1e-1)
    assert torch.equal(node.reference(text), few)
