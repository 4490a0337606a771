"""SmolLM3: every fourth layer (here the second) goes without positions."""

from typing import Final

from tests.tiny.model import COMMON, Draw, Model, Tensors, plain_layer, signed_ends
from tests.tiny.qwen import CHATML_VOCABULARY


def _weights(draw: Draw) -> Tensors:
    return signed_ends(draw) | plain_layer(draw, 0) | plain_layer(draw, 1)


SMOLLM3: Final = Model(
    architecture="SmolLM3ForCausalLM",
    proves="layers without positions",
    config=COMMON
    | {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "layer_types": ["full_attention", "full_attention"],
        "max_window_layers": 28,
        "mlp_bias": False,
        "model_type": "smollm3",
        "no_rope_layer_interval": 4,
        "no_rope_layers": [1, 0],
        "pad_token_id": 509,
        "pretraining_tp": 2,
        "rope_scaling": None,
        "rope_theta": 5000000.0,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
    },
    vocabulary=CHATML_VOCABULARY,
    weights=_weights,
)
