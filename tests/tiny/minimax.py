"""MiniMax-M2: experts chosen by sigmoids with a bias, norms over all heads, angles for half of a head."""

from typing import Final

from tests.tiny.mistral import mixture
from tests.tiny.model import (
    COMMON,
    EXPERTS,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    Draw,
    Model,
    Tensors,
    attention,
    ends,
    norms,
)
from tests.tiny.qwen import CHATML_VOCABULARY


def _weights(draw: Draw) -> Tensors:
    tensors = ends(draw)
    for layer in range(2):
        at = f"model.layers.{layer}"
        tensors |= norms(draw, layer, ("input_layernorm", "post_attention_layernorm"))
        tensors |= attention(draw, layer) | mixture(draw, layer)
        tensors |= {
            f"{at}.self_attn.q_norm.weight": draw.norm(HEADS * HEAD_DIM),
            f"{at}.self_attn.k_norm.weight": draw.norm(KV_HEADS * HEAD_DIM),
            f"{at}.block_sparse_moe.e_score_correction_bias": draw.bias(EXPERTS),
        }
    return tensors


MINIMAX_M2: Final = Model(
    architecture="MiniMaxM2ForCausalLM",
    proves="experts chosen by sigmoids with a bias; norms over all heads; angles for half of a head",
    config=COMMON
    | {
        "head_dim": HEAD_DIM,
        "model_type": "minimax_m2",
        "num_experts_per_tok": 2,
        "num_local_experts": EXPERTS,
        "qk_norm_type": "per_layer",
        "rotary_dim": HEAD_DIM // 2,
        "scoring_func": "sigmoid",
        "use_qk_norm": True,
        "use_routing_bias": True,
    },
    vocabulary=CHATML_VOCABULARY,
    weights=_weights,
)
