"""Phi-3: queries, keys and values in one matrix, gate and up in another; a window, or long angles."""

from typing import Final

from tests.tiny.model import (
    COMMON,
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
    norms,
)
from tests.tiny.vocabulary import Vocabulary

CHANGE: Final = 192
"""Where the angles change from short to long factors; 4096 as published."""

_VOCABULARY: Final = Vocabulary(
    specials=["<unk>", "<s>", "</s>", "<|endoftext|>", "<|assistant|>", "<|system|>", "<|end|>", "<|user|>"],
    bos="<s>",
    ends=["<|endoftext|>", "<|assistant|>", "<|end|>"],
    template=(
        "{% for message in messages %}"
        "{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
    ),
    pieces=True,
    leads_with_space=True,
)

_CONFIG: Final = COMMON | {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_phi3.Phi3Config",
        "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
    },
    "embd_pdrop": 0.0,
    "model_type": "phi3",
    "pad_token_id": 3,
    "resid_pdrop": 0.0,
    "rms_norm_eps": 1e-5,
}


def _weights(draw: Draw) -> Tensors:
    tensors = ends(draw)
    for layer in range(2):
        at = f"model.layers.{layer}"
        tensors |= norms(draw, layer, ("input_layernorm", "post_attention_layernorm"))
        tensors |= {
            f"{at}.self_attn.qkv_proj.weight": draw.matrix((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
            f"{at}.self_attn.o_proj.weight": draw.matrix(HIDDEN, HEADS * HEAD_DIM),
            f"{at}.mlp.gate_up_proj.weight": draw.matrix(2 * INTERMEDIATE, HIDDEN),
            f"{at}.mlp.down_proj.weight": draw.matrix(HIDDEN, INTERMEDIATE),
        }
    return tensors


PHI3: Final = Model(
    architecture="Phi3ForCausalLM",
    proves="fused matrices; a window",
    config=_CONFIG
    | {"original_max_position_embeddings": 512, "rope_scaling": None, "sliding_window": WINDOW},
    vocabulary=_VOCABULARY,
    weights=_weights,
    windows=(WINDOW, WINDOW),
)

PHI3_LONGROPE: Final = Model(
    architecture="Phi3ForCausalLM",
    proves="longrope",
    config=_CONFIG
    | {
        "original_max_position_embeddings": CHANGE,
        "rope_scaling": {
            "long_factor": [1.5, 2.0, 4.0, 8.0, 12.0, 16.0, 24.0, 32.0],
            "short_factor": [1.0, 1.05, 1.1, 1.2, 1.3, 1.5, 1.8, 2.0],
            "type": "longrope",
        },
        "sliding_window": 262144,
    },
    vocabulary=_VOCABULARY,
    weights=_weights,
)
