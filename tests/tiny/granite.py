"""Granite: multipliers of embeddings, residuals, attention and logits. Granite 4 without Mamba."""

from typing import Final

from tests.tiny.model import (
    COMMON,
    HIDDEN,
    INTERMEDIATE,
    Draw,
    Model,
    Tensors,
    attention,
    norms,
    plain_layer,
    signed_ends,
)
from tests.tiny.qwen import CHATML_VOCABULARY


def _weights(draw: Draw) -> Tensors:
    return signed_ends(draw) | plain_layer(draw, 0) | plain_layer(draw, 1)


GRANITE: Final = Model(
    architecture="GraniteForCausalLM",
    proves="multipliers of embeddings, residuals, scores and logits",
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


def _dense_layer(draw: Draw, layer: int) -> Tensors:
    """A layer of a Granite 4 without experts and Mamba: gate and up are one matrix."""
    before = f"model.layers.{layer}.shared_mlp"
    return (
        norms(draw, layer, ("input_layernorm", "post_attention_layernorm"))
        | attention(draw, layer)
        | {
            f"{before}.input_linear.weight": draw.matrix(2 * INTERMEDIATE, HIDDEN),
            f"{before}.output_linear.weight": draw.matrix(HIDDEN, INTERMEDIATE),
        }
    )


def _dense_weights(draw: Draw) -> Tensors:
    return signed_ends(draw) | _dense_layer(draw, 0) | _dense_layer(draw, 1)


GRANITE4: Final = Model(
    architecture="GraniteMoeHybridForCausalLM",
    proves="Granite 4's micro sizes: neither states nor experts",
    config={
        **GRANITE.config,
        "layer_types": ["attention", "attention"],
        "mamba_d_head": 8,
        "mamba_d_state": 16,
        "mamba_expand": 2,
        "mamba_n_heads": 16,
        "model_type": "granitemoehybrid",
        "num_experts_per_tok": 0,
        "num_local_experts": 0,
        "position_embedding_type": "rope",
        "shared_intermediate_size": INTERMEDIATE,
        "time_step_limit": [0.0, {"__float__": "Infinity"}],
    },
    vocabulary=CHATML_VOCABULARY,
    weights=_dense_weights,
)
