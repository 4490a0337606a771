"""Sparse attention: DeepSeek V3.2 and GLM-5, whose indexers choose the keys that a token attends to.

Both choose eight keys: fewer than most texts of the tests have. DeepSeek's indexers have few heads here, so
that many scores are exactly 0, and the last chosen key is often one of several with an equal score. GLM's
have as many as it takes for that to be rare, as in published models.
"""

from typing import Final

from models.base import CellShape, KVLayout
from tests.tiny.latent import LATENT_NORMS, MIXTURE, Q_RANK, RANK, ROTATED, YARN, latent_attention
from tests.tiny.mixtures import experts, gate
from tests.tiny.model import HIDDEN, Draw, Model, Tensors, ends, mlp, norms
from tests.tiny.qwen import CHATML_VOCABULARY

TOP: Final = 8
_FEW_HEADS: Final = 4
_MANY_HEADS: Final = 16
_INDEX_DIM: Final = 20

_PLAIN: Final = CellShape(1, RANK + ROTATED, RANK, is_latent=True)
_INDEXED: Final = CellShape(1, RANK + ROTATED + _INDEX_DIM, RANK, is_latent=True)


def _layout(*cells: CellShape) -> KVLayout:
    return KVLayout(
        layers=len(cells),
        kv_heads=1,
        head_dim=_INDEXED.key,
        cells=cells,
        needs=frozenset({"cells", "indexes"}),
    )


def _indexer(draw: Draw, layer: int, heads: int) -> Tensors:
    at = f"model.layers.{layer}.self_attn.indexer"
    return {
        f"{at}.wq_b.weight": draw.matrix(heads * _INDEX_DIM, Q_RANK),
        f"{at}.wk.weight": draw.matrix(_INDEX_DIM, HIDDEN),
        f"{at}.k_norm.weight": draw.norm(_INDEX_DIM),
        f"{at}.k_norm.bias": draw.bias(_INDEX_DIM),
        f"{at}.weights_proj.weight": draw.matrix(heads, HIDDEN),
    }


def _layer(draw: Draw, layer: int, heads: int, *, is_dense: bool = False) -> Tensors:
    """A layer; without an indexer if it has no heads."""
    found = norms(draw, layer, LATENT_NORMS) | latent_attention(draw, layer)
    if heads:
        found |= _indexer(draw, layer, heads)
    return found | (mlp(draw, layer) if is_dense else gate(draw, layer) | experts(draw, layer, shared=True))


def _deepseek_weights(draw: Draw) -> Tensors:
    return ends(draw) | _layer(draw, 0, _FEW_HEADS, is_dense=True) | _layer(draw, 1, _FEW_HEADS)


def _glm_weights(draw: Draw) -> Tensors:
    tensors = ends(draw) | _layer(draw, 0, _MANY_HEADS, is_dense=True)
    for layer, heads in enumerate((_MANY_HEADS, 0, _MANY_HEADS), start=1):
        tensors |= _layer(draw, layer, heads)
    return tensors


_SPARSE: Final = MIXTURE | {
    "index_head_dim": _INDEX_DIM,
    "index_topk": TOP,
    "num_nextn_predict_layers": 1,
}

DEEPSEEK_V32: Final = Model(
    architecture="DeepseekV32ForCausalLM",
    proves="latent attention to eight keys that an indexer chooses; YaRN, experts",
    config=_SPARSE
    | {"ep_size": 1, "index_n_heads": _FEW_HEADS, "model_type": "deepseek_v32", "rope_scaling": YARN},
    vocabulary=CHATML_VOCABULARY,
    weights=_deepseek_weights,
    layout=_layout(_INDEXED, _INDEXED),
)

GLM_DSA: Final = Model(
    architecture="GlmMoeDsaForCausalLM",
    proves="the same; a layer that attends to the keys of the indexer before it",
    config=_SPARSE
    | {
        "index_n_heads": _MANY_HEADS,
        "index_skip_topk_offset": 2,
        "index_topk_freq": 2,
        "model_type": "glm_moe_dsa",
        "n_group": 1,
        "num_hidden_layers": 4,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    vocabulary=CHATML_VOCABULARY,
    weights=_glm_weights,
    windows=(None,) * 4,
    layout=_layout(_INDEXED, _INDEXED, _PLAIN, _INDEXED),
)
