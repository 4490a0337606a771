"""Latent attention: DeepSeek V2 and V3, GLM-4.7's small sizes, MiniCPM3."""

from typing import Final

from models.base import CellShape, KVLayout
from tests.tiny.mixtures import experts, gate
from tests.tiny.model import COMMON, HEADS, HIDDEN, Draw, Model, Tensors, ends, mlp, norms, signed_ends
from tests.tiny.qwen import CHATML_VOCABULARY

Q_RANK: Final = 32
RANK: Final = 24
ROTATED: Final = 8
_PLAIN: Final = 16
_VALUE: Final = 12
_EXPERTS: Final = 4

LATENT_NORMS: Final = ("input_layernorm", "post_attention_layernorm")
_LAYOUT: Final = KVLayout(
    layers=2,
    kv_heads=1,
    head_dim=RANK + ROTATED,
    cells=(CellShape(1, RANK + ROTATED, RANK, is_latent=True),) * 2,
    needs=frozenset({"cells"}),
)


def latent_attention(draw: Draw, layer: int, *, q_rank: int | None = Q_RANK) -> Tensors:
    at = f"model.layers.{layer}.self_attn"
    queries = HEADS * (_PLAIN + ROTATED)
    if q_rank is None:
        found = {f"{at}.q_proj.weight": draw.matrix(queries, HIDDEN)}
    else:
        found = {
            f"{at}.q_a_proj.weight": draw.matrix(q_rank, HIDDEN),
            f"{at}.q_a_layernorm.weight": draw.norm(q_rank),
            f"{at}.q_b_proj.weight": draw.matrix(queries, q_rank),
        }
    return found | {
        f"{at}.kv_a_proj_with_mqa.weight": draw.matrix(RANK + ROTATED, HIDDEN),
        f"{at}.kv_a_layernorm.weight": draw.norm(RANK),
        f"{at}.kv_b_proj.weight": draw.matrix(HEADS * (_PLAIN + _VALUE), RANK),
        f"{at}.o_proj.weight": draw.matrix(HIDDEN, HEADS * _VALUE),
    }


def _v2_weights(draw: Draw) -> Tensors:
    first = norms(draw, 0, LATENT_NORMS) | latent_attention(draw, 0, q_rank=None) | mlp(draw, 0)
    second = norms(draw, 1, LATENT_NORMS) | latent_attention(draw, 1, q_rank=None)
    return ends(draw) | first | second | gate(draw, 1, bias=False) | experts(draw, 1, shared=True)


def _v3_weights(draw: Draw) -> Tensors:
    first = norms(draw, 0, LATENT_NORMS) | latent_attention(draw, 0) | mlp(draw, 0)
    second = norms(draw, 1, LATENT_NORMS) | latent_attention(draw, 1)
    return ends(draw) | first | second | gate(draw, 1) | experts(draw, 1, shared=True)


def _dense_weights(draw: Draw) -> Tensors:
    tensors = signed_ends(draw)
    for layer in range(2):
        tensors |= norms(draw, layer, LATENT_NORMS) | latent_attention(draw, layer) | mlp(draw, layer)
    return tensors


_LATENT: Final = COMMON | {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "kv_lora_rank": RANK,
    "num_key_value_heads": HEADS,
    "q_lora_rank": Q_RANK,
    "qk_nope_head_dim": _PLAIN,
    "qk_rope_head_dim": ROTATED,
    "v_head_dim": _VALUE,
}
MIXTURE: Final = _LATENT | {
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 64,
    "n_group": 2,
    "n_routed_experts": _EXPERTS,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sigmoid",
    "topk_group": 1,
    "topk_method": "noaux_tc",
}
YARN: Final = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 8,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
    "type": "yarn",
}

DEEPSEEK_V2: Final = Model(
    architecture="DeepseekV2ForCausalLM",
    proves="latent attention, groups of experts; queries of full rank",
    config=MIXTURE
    | {
        "model_type": "deepseek_v2",
        "norm_topk_prob": False,
        "q_lora_rank": None,
        "rope_scaling": None,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "topk_method": "group_limited_greedy",
    },
    vocabulary=CHATML_VOCABULARY,
    weights=_v2_weights,
    layout=_LAYOUT,
)

DEEPSEEK_V3: Final = Model(
    architecture="DeepseekV3ForCausalLM",
    proves="latent attention, YaRN; a bias of the gate",
    config=MIXTURE
    | {
        "ep_size": 1,
        "model_type": "deepseek_v3",
        "num_nextn_predict_layers": 1,
        "rope_scaling": YARN,
    },
    vocabulary=CHATML_VOCABULARY,
    weights=_v3_weights,
    layout=_LAYOUT,
)

GLM4_LITE: Final = Model(
    architecture="Glm4MoeLiteForCausalLM",
    proves="latent attention, as in GLM-4.7-Flash",
    config=MIXTURE
    | {
        "mlp_layer_types": ["dense", "sparse"],
        "model_type": "glm4_moe_lite",
        "n_group": 1,
        "partial_rotary_factor": 1.0,
        "rope_interleave": True,
    },
    vocabulary=CHATML_VOCABULARY,
    weights=_v3_weights,
    layout=_LAYOUT,
)

MINICPM3: Final = Model(
    architecture="MiniCPM3ForCausalLM",
    proves="latent attention without experts",
    config=_LATENT
    | {
        "dim_model_base": 32,
        "model_type": "minicpm3",
        "scale_depth": 1.4,
        "scale_emb": 2,
        "tie_word_embeddings": True,
    },
    vocabulary=CHATML_VOCABULARY,
    weights=_dense_weights,
    layout=_LAYOUT,
)
