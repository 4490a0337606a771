"""Granite: multipliers of embeddings, residuals, attention and logits."""

from typing import Final

from tests.tiny.model import COMMON, Draw, Model, Tensors, plain_layer, signed_ends
from tests.tiny.qwen import CHATML_VOCABULARY


def _weights(draw: Draw) -> Tensors:
    return signed_ends(draw) | plain_layer(draw, 0) | plain_layer(draw, 1)


GRANITE: Final = Model(
    architecture="GraniteForCausalLM",
    config=COMMON
    | {
        "attention_bias": False,
        "attention_dropout": 0.1,
        "attention_multiplier": 0.125,
        "embedding_multiplier": 6.0,
        "logits_scaling": 4.0,
        "mlp_bias": False,
        "model_type": "granite",
        "residual_multiplier": 0.7,
        "rope_scaling": None,
        "tie_word_embeddings": True,
    },
    vocabulary=CHATML_VOCABULARY,
    weights=_weights,
)
