"""Attention sinks: gpt-oss, MiMo-V2-Flash, whose layers differ in their heads, and Granite with windows."""

from typing import Final

from models.base import CellShape, KVLayout
from tests.tiny.mixtures import experts, gate
from tests.tiny.model import (
    COMMON,
    EXPERTS,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INTERMEDIATE,
    KV_HEADS,
    WINDOW,
    Draw,
    Model,
    Tensors,
    ends,
    mlp,
    norms,
    plain_layer,
    signed_ends,
)
from tests.tiny.qwen import CHATML_VOCABULARY, biased_attention

_NORMS: Final = ("input_layernorm", "post_attention_layernorm")
_VALUE: Final = 12
"""The numbers of a value of MiMo, whose keys have more."""
_SINKS: Final = 2.0
"""The standard deviation of sinks: of the scores of keys, or they would not matter."""


def _uniform(layers: int) -> KVLayout:
    return KVLayout(layers=layers, kv_heads=KV_HEADS, head_dim=HEAD_DIM, needs=frozenset({"sinks"}))


def _sinks(draw: Draw, layer: int, name: str = "sinks") -> Tensors:
    return {f"model.layers.{layer}.self_attn.{name}": draw.tensor(HEADS, scale=_SINKS)}


def _gpt_oss_weights(draw: Draw) -> Tensors:
    tensors = ends(draw)
    for layer in range(2):
        at = f"model.layers.{layer}"
        tensors |= norms(draw, layer, _NORMS) | biased_attention(draw, layer) | _sinks(draw, layer)
        tensors |= {
            f"{at}.self_attn.o_proj.bias": draw.bias(HIDDEN),
            f"{at}.mlp.router.weight": draw.matrix(EXPERTS, HIDDEN),
            f"{at}.mlp.router.bias": draw.bias(EXPERTS),
            f"{at}.mlp.experts.gate_up_proj": draw.tensor(EXPERTS, HIDDEN, 2 * INTERMEDIATE),
            f"{at}.mlp.experts.gate_up_proj_bias": draw.tensor(EXPERTS, 2 * INTERMEDIATE),
            f"{at}.mlp.experts.down_proj": draw.tensor(EXPERTS, INTERMEDIATE, HIDDEN),
            f"{at}.mlp.experts.down_proj_bias": draw.tensor(EXPERTS, HIDDEN),
        }
    return tensors


GPT_OSS: Final = Model(
    architecture="GptOssForCausalLM",
    proves="attention sinks; windows in every second layer; biased experts; [MXFP4](#weights-of-fewer-bits)",
    config=COMMON
    | {
        "attention_bias": True,
        "attention_dropout": 0.0,
        "experts_per_token": 2,
        "head_dim": HEAD_DIM,
        "initial_context_length": 64,
        "layer_types": ["sliding_attention", "full_attention"],
        "model_type": "gpt_oss",
        "num_experts_per_tok": 2,
        "num_local_experts": EXPERTS,
        "output_router_logits": False,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "router_aux_loss_coef": 0.9,
        "sliding_window": WINDOW,
        "swiglu_limit": 7.0,
    },
    vocabulary=CHATML_VOCABULARY,
    weights=_gpt_oss_weights,
    windows=(WINDOW, None),
    layout=_uniform(2),
)


def _mimo_layer(draw: Draw, layer: int, kv_heads: int) -> Tensors:
    at = f"model.layers.{layer}.self_attn"
    return norms(draw, layer, _NORMS) | {
        f"{at}.q_proj.weight": draw.matrix(HEADS * HEAD_DIM, HIDDEN),
        f"{at}.k_proj.weight": draw.matrix(kv_heads * HEAD_DIM, HIDDEN),
        f"{at}.v_proj.weight": draw.matrix(kv_heads * _VALUE, HIDDEN),
        f"{at}.o_proj.weight": draw.matrix(HIDDEN, HEADS * _VALUE, 0.8),
    }


def _mimo_weights(draw: Draw) -> Tensors:
    first = _mimo_layer(draw, 0, KV_HEADS) | mlp(draw, 0)
    second = _mimo_layer(draw, 1, 2 * KV_HEADS) | _sinks(draw, 1, "attention_sink_bias")
    return ends(draw) | first | second | gate(draw, 1) | experts(draw, 1)


MIMO: Final = Model(
    architecture="MiMoV2FlashForCausalLM",
    proves="sinks in layers with windows, which have twice the KV heads; values narrower than keys",
    config=COMMON
    | {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attention_value_scale": 0.707,
        "head_dim": HEAD_DIM,
        "layer_types": ["full_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse"],
        "model_type": "mimo_v2_flash",
        "moe_intermediate_size": 64,
        "n_group": 1,
        "n_routed_experts": EXPERTS,
        "norm_topk_prob": True,
        "num_experts_per_tok": 2,
        "rope_parameters": {
            "full_attention": {
                "partial_rotary_factor": 0.5,
                "rope_theta": 5000000.0,
                "rope_type": "default",
            },
            "sliding_attention": {
                "partial_rotary_factor": 0.5,
                "rope_theta": 10000.0,
                "rope_type": "default",
            },
        },
        "sliding_window": WINDOW,
        "topk_group": 1,
        "v_head_dim": _VALUE,
    },
    vocabulary=CHATML_VOCABULARY,
    weights=_mimo_weights,
    windows=(None, WINDOW),
    layout=KVLayout(
        layers=2,
        kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        cells=(CellShape(KV_HEADS, HEAD_DIM, _VALUE), CellShape(2 * KV_HEADS, HEAD_DIM, _VALUE)),
        needs=frozenset({"cells", "sinks"}),
    ),
)


def _granite_weights(draw: Draw) -> Tensors:
    tensors = signed_ends(draw)
    for layer in range(2):
        tensors |= plain_layer(draw, layer) | _sinks(draw, layer)
    return tensors


GRANITE_SWA: Final = Model(
    architecture="GraniteSWAForCausalLM",
    proves="sinks and windows",
    config=COMMON
    | {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attention_multiplier": 0.125,
        "embedding_multiplier": 6.0,
        "layer_types": ["full_attention", "sliding_attention"],
        "logits_scaling": 4.0,
        "mlp_bias": False,
        "model_type": "granite_swa",
        "residual_multiplier": 0.7,
        "sliding_window": WINDOW,
        "tie_word_embeddings": True,
    },
    vocabulary=CHATML_VOCABULARY,
    weights=_granite_weights,
    windows=(None, WINDOW),
    layout=_uniform(2),
)
