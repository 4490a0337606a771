"""Llama 4: chunks of the text, layers without angles whose queries grow with their position, and experts."""

from typing import Final

from models.base import KVLayout
from tests.tiny.llama import LLAMA3_VOCABULARY
from tests.tiny.model import (
    COMMON,
    EXPERTS,
    HEAD_DIM,
    HIDDEN,
    INTERMEDIATE,
    KV_HEADS,
    Draw,
    Model,
    Tensors,
    attention,
    ends,
    norms,
)

CHUNK: Final = 24
"""The length of a chunk: shorter than most texts of the tests."""
_SIZE: Final = 64
_NORMS: Final = ("input_layernorm", "post_attention_layernorm")


def _weights(draw: Draw) -> Tensors:
    tensors = ends(draw)
    for layer in range(3):
        tensors |= norms(draw, layer, _NORMS) | attention(draw, layer)
        at = f"model.layers.{layer}.feed_forward"
        if layer == 0:
            shapes = {"gate_proj": (INTERMEDIATE, HIDDEN), "up_proj": (INTERMEDIATE, HIDDEN)}
            tensors |= {f"{at}.{name}.weight": draw.matrix(*shape) for name, shape in shapes.items()}
            tensors |= {f"{at}.down_proj.weight": draw.matrix(HIDDEN, INTERMEDIATE)}
            continue
        tensors |= {
            f"{at}.router.weight": draw.matrix(EXPERTS, HIDDEN),
            f"{at}.experts.gate_up_proj": draw.tensor(EXPERTS, HIDDEN, 2 * _SIZE),
            f"{at}.experts.down_proj": draw.tensor(EXPERTS, _SIZE, HIDDEN),
            f"{at}.shared_expert.gate_proj.weight": draw.matrix(_SIZE, HIDDEN),
            f"{at}.shared_expert.up_proj.weight": draw.matrix(_SIZE, HIDDEN),
            f"{at}.shared_expert.down_proj.weight": draw.matrix(HIDDEN, _SIZE),
        }
    return tensors


LLAMA4: Final = Model(
    architecture="Llama4ForCausalLM",
    proves="chunks; layers without positions, whose queries grow with the text",
    config=COMMON
    | {
        "attention_bias": False,
        "attention_chunk_size": CHUNK,
        "attention_dropout": 0.0,
        "attn_scale": 0.5,  # 0.1 as published, every 8,192 tokens; here every 16 tokens
        "attn_temperature_tuning": True,
        "floor_scale": 16,
        "head_dim": HEAD_DIM,
        "intermediate_size": _SIZE,
        "intermediate_size_mlp": INTERMEDIATE,
        "interleave_moe_layer_step": 1,
        "model_type": "llama4_text",
        "moe_layers": [1, 2],
        "no_rope_layers": [1, 1, 0],
        "num_experts_per_tok": 1,
        "num_hidden_layers": 3,
        "num_local_experts": EXPERTS,
        "output_router_logits": False,
        "rope_scaling": None,
        "rope_theta": 500000.0,
        "router_aux_loss_coef": 0.001,
        "router_jitter_noise": 0.0,
        "use_qk_norm": True,
    },
    vocabulary=LLAMA3_VOCABULARY,
    weights=_weights,
    windows=(None, None, None),
    layout=KVLayout(layers=3, kv_heads=KV_HEADS, head_dim=HEAD_DIM, needs=frozenset({"chunks"})),
)
