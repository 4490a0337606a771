"""OLMo 2 (norms behind the blocks, and over all heads' queries and keys at once), and OLMo 3's windows."""

from typing import Final

from tests.tiny.model import (
    COMMON,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    WINDOW,
    Draw,
    Model,
    Tensors,
    attention,
    ends,
    mlp,
    norms,
)
from tests.tiny.qwen import CHATML_VOCABULARY

_CONFIG: Final = COMMON | {"attention_bias": False, "attention_dropout": 0.0, "rope_theta": 500000.0}


def _weights(draw: Draw) -> Tensors:
    tensors = ends(draw)
    for layer in range(2):
        at = f"model.layers.{layer}.self_attn"
        tensors |= norms(draw, layer, ("post_attention_layernorm", "post_feedforward_layernorm"))
        tensors |= attention(draw, layer) | mlp(draw, layer)
        tensors |= {
            f"{at}.q_norm.weight": draw.norm(HEADS * HEAD_DIM),
            f"{at}.k_norm.weight": draw.norm(KV_HEADS * HEAD_DIM),
        }
    return tensors


OLMO2: Final = Model(
    architecture="Olmo2ForCausalLM",
    proves="norms after the blocks, and over all heads at once",
    config=_CONFIG | {"model_type": "olmo2", "rope_scaling": None},
    vocabulary=CHATML_VOCABULARY,
    weights=_weights,
)

OLMO3: Final = Model(
    architecture="Olmo3ForCausalLM",
    proves="windows, YaRN",
    config=_CONFIG
    | {
        "layer_types": ["sliding_attention", "full_attention"],
        "model_type": "olmo3",
        "rope_scaling": {
            "attention_factor": 1.2,
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "rope_type": "yarn",
        },
        "sliding_window": WINDOW,
    },
    vocabulary=CHATML_VOCABULARY,
    weights=_weights,
    windows=(WINDOW, None),
)
