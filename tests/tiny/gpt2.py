"""GPT-2 under its published names: no prefix, transposed matrices, and the causal mask among the weights."""

from typing import Any, Final

import numpy as np

from models.base import KVLayout
from tests.tiny.model import HEAD_DIM, HEADS, HIDDEN, MAX_POSITIONS, Draw, Model, Tensors
from tests.tiny.qwen import CHATML_VOCABULARY
from tests.tiny.vocabulary import VOCAB_SIZE

_LAYERS: Final = 2


def _linear(draw: Draw, name: str, inputs: int, outputs: int) -> Tensors:
    return {f"{name}.weight": draw.matrix(inputs, outputs), f"{name}.bias": draw.bias(outputs)}


def _norm(draw: Draw, name: str) -> Tensors:
    return {f"{name}.weight": draw.norm(HIDDEN), f"{name}.bias": draw.bias(HIDDEN)}


def _weights(draw: Draw) -> Tensors:
    tensors = _norm(draw, "ln_f") | {
        "ln_f.weight": draw.tensor(HIDDEN, scale=1.0),  # of both signs, see `signed_ends`
        "wte.weight": draw.matrix(VOCAB_SIZE, HIDDEN),
        "wpe.weight": draw.matrix(MAX_POSITIONS, HIDDEN),
    }
    for layer in range(_LAYERS):
        at = f"h.{layer}"
        tensors |= _norm(draw, f"{at}.ln_1") | _norm(draw, f"{at}.ln_2")
        tensors |= _linear(draw, f"{at}.attn.c_attn", HIDDEN, 3 * HIDDEN)
        tensors |= _linear(draw, f"{at}.attn.c_proj", HIDDEN, HIDDEN)
        tensors |= _linear(draw, f"{at}.mlp.c_fc", HIDDEN, 4 * HIDDEN)
        tensors |= _linear(draw, f"{at}.mlp.c_proj", 4 * HIDDEN, HIDDEN)
        tensors |= {f"{at}.attn.bias": np.tril(np.ones((1, 1, MAX_POSITIONS, MAX_POSITIONS), np.float32))}
    return tensors


_CONFIG: Final[dict[str, Any]] = {
    "activation_function": "gelu_new",
    "attn_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-5,
    "model_type": "gpt2",
    "n_ctx": MAX_POSITIONS,
    "n_embd": HIDDEN,
    "n_head": HEADS,
    "n_layer": _LAYERS,
    "n_positions": MAX_POSITIONS,
    "resid_pdrop": 0.1,
}

GPT2: Final = Model(
    architecture="GPT2LMHeadModel",
    proves="learned positions, biases, a tied head",
    config=_CONFIG,
    vocabulary=CHATML_VOCABULARY,
    weights=_weights,
    layout=KVLayout(layers=_LAYERS, kv_heads=HEADS, head_dim=HEAD_DIM),
)
