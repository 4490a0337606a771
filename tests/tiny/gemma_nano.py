"""Gemma 3n and Gemma 4: inputs for each layer, layers that share keys and values, and heads of two sizes."""

from typing import Any, Final

from models.base import CellShape, KVLayout
from tests.tiny.gemma import FOUR_NORMS, TUNED_VOCABULARY
from tests.tiny.model import (
    COMMON,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    WINDOW,
    Draw,
    Model,
    Tensors,
    mlp,
    norms,
)
from tests.tiny.vocabulary import VOCAB_SIZE

_LAYERS: Final = 4
_OWN: Final = 2
"""The layers with their own keys and values; those after them use theirs."""
_INPUT: Final = 8
"""The width of a layer's own input."""
_RANK: Final = 8
_WIDE: Final = 32
"""The numbers of a head of Gemma 4's layers that see the whole text."""
_KINDS: Final = ["sliding_attention", "full_attention"] * 2
_EMBEDDINGS: Final = 1 / HIDDEN**0.5


def _ends(draw: Draw) -> Tensors:
    return {
        "model.embed_tokens.weight": draw.matrix(VOCAB_SIZE, HIDDEN, _EMBEDDINGS),
        "model.embed_tokens_per_layer.weight": draw.matrix(VOCAB_SIZE, _LAYERS * _INPUT),
        "model.norm.weight": draw.tensor(HIDDEN, scale=1.0),
        "model.per_layer_model_projection.weight": draw.matrix(_LAYERS * _INPUT, HIDDEN),
        "model.per_layer_projection_norm.weight": draw.norm(_INPUT),
    }


def _attention(draw: Draw, layer: int, head: int) -> Tensors:
    at = f"model.layers.{layer}.self_attn"
    found = {
        f"{at}.q_proj.weight": draw.matrix(HEADS * head, HIDDEN),
        f"{at}.q_norm.weight": draw.norm(head),
        f"{at}.o_proj.weight": draw.matrix(HIDDEN, HEADS * head),
    }
    if layer < _OWN:
        found |= {
            f"{at}.k_proj.weight": draw.matrix(KV_HEADS * head, HIDDEN),
            f"{at}.k_norm.weight": draw.norm(head),
            f"{at}.v_proj.weight": draw.matrix(KV_HEADS * head, HIDDEN),
        }
    return found


def _inputs(draw: Draw, layer: int) -> Tensors:
    at = f"model.layers.{layer}"
    return norms(draw, layer, ("post_per_layer_input_norm",)) | {
        f"{at}.per_layer_input_gate.weight": draw.matrix(_INPUT, HIDDEN),
        f"{at}.per_layer_projection.weight": draw.matrix(HIDDEN, _INPUT),
    }


def _gemma3n_weights(draw: Draw) -> Tensors:
    tensors = _ends(draw) | {
        "model.altup_projections.0.weight": draw.matrix(HIDDEN, HIDDEN),
        "model.altup_unembed_projections.0.weight": draw.matrix(HIDDEN, HIDDEN),
    }
    for layer in range(_LAYERS):
        at = f"model.layers.{layer}"
        tensors |= norms(draw, layer, FOUR_NORMS) | _attention(draw, layer, HEAD_DIM)
        tensors |= mlp(draw, layer) | _inputs(draw, layer)
        tensors |= {
            f"{at}.altup.correct_output_scale": draw.tensor(HIDDEN, scale=1.0),
            f"{at}.altup.correction_coefs.weight": draw.matrix(2, 2),
            f"{at}.altup.modality_router.weight": draw.matrix(2, HIDDEN),
            f"{at}.altup.prediction_coefs.weight": draw.matrix(4, 2),
            f"{at}.altup.router_norm.weight": draw.norm(HIDDEN),
            f"{at}.laurel.linear_left.weight": draw.matrix(_RANK, HIDDEN),
            f"{at}.laurel.linear_right.weight": draw.matrix(HIDDEN, _RANK),
            f"{at}.laurel.post_laurel_norm.weight": draw.norm(HIDDEN),
        }
    return tensors


def _gemma4_weights(draw: Draw) -> Tensors:
    tensors = _ends(draw)
    for layer, kind in enumerate(_KINDS):
        head = _WIDE if kind == "full_attention" else HEAD_DIM
        tensors |= norms(draw, layer, FOUR_NORMS) | _attention(draw, layer, head)
        tensors |= mlp(draw, layer) | _inputs(draw, layer)
        tensors |= {f"model.layers.{layer}.layer_scalar": draw.norm(1)}
    return tensors


_CONFIG: Final[dict[str, Any]] = COMMON | {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": HEAD_DIM,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size_per_layer_input": _INPUT,
    "layer_types": _KINDS,
    "num_hidden_layers": _LAYERS,
    "num_kv_shared_layers": _LAYERS - _OWN,
    "pad_token_id": 0,
    "sliding_window": WINDOW,
    "tie_word_embeddings": True,
    "vocab_size_per_layer_input": VOCAB_SIZE,
}

GEMMA3N: Final = Model(
    architecture="Gemma3nForCausalLM",
    proves="inputs of each layer; layers that share keys and values",
    config=_CONFIG
    | {
        "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0],
        "altup_active_idx": 0,
        "altup_coef_clip": 120.0,
        "altup_correct_scale": True,
        "altup_num_inputs": 2,
        "final_logit_softcapping": 30.0,
        "laurel_rank": _RANK,
        "model_type": "gemma3n_text",
        "rope_local_base_freq": 10000.0,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
    },
    vocabulary=TUNED_VOCABULARY,
    weights=_gemma3n_weights,
    windows=(WINDOW, None) * 2,
)

GEMMA4: Final = Model(
    architecture="Gemma4ForCausalLM",
    proves="the same as Gemma 3n, with wider heads in layers that see the whole text",
    config=_CONFIG
    | {
        "attention_k_eq_v": False,
        "enable_moe_block": False,
        "final_logit_softcapping": 30.0,
        "global_head_dim": _WIDE,
        "model_type": "gemma4_text",
        "num_global_key_value_heads": None,
        "rope_parameters": {
            "full_attention": {
                "partial_rotary_factor": 0.25,
                "rope_theta": 1000000.0,
                "rope_type": "proportional",
            },
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "use_double_wide_mlp": False,
    },
    vocabulary=TUNED_VOCABULARY,
    weights=_gemma4_weights,
    windows=(WINDOW, None) * 2,
    layout=KVLayout(
        layers=_LAYERS,
        kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        cells=(CellShape(KV_HEADS, HEAD_DIM, HEAD_DIM), CellShape(KV_HEADS, _WIDE, _WIDE)) * 2,
        needs=frozenset({"cells"}),
    ),
)
