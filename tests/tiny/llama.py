"""Llama; Llama 3.1's scaled angles; and dynamic ones, which texts longer than served would turn."""

from typing import Final

from tests.tiny.model import COMMON, HEAD_DIM, Draw, Model, Tensors, ends, plain_layer, tied_ends
from tests.tiny.vocabulary import Vocabulary

LLAMA3_VOCABULARY: Final = Vocabulary(
    specials=[
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
    ],
    bos="<|begin_of_text|>",
    ends=["<|eot_id|>"],
    template=(
        "{{ bos_token }}{% for message in messages %}"
        "<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n"
        "{{ message['content'] | trim }}<|eot_id|>"
        "{% endfor %}{% if add_generation_prompt %}"
        "<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    ),
)

_CONFIG: Final = COMMON | {
    "attention_bias": False,
    "head_dim": HEAD_DIM,
    "mlp_bias": False,
    "model_type": "llama",
    "rope_scaling": None,
}


def _weights(draw: Draw) -> Tensors:
    return ends(draw) | plain_layer(draw, 0) | plain_layer(draw, 1)


def _tied_weights(draw: Draw) -> Tensors:
    return tied_ends(draw) | plain_layer(draw, 0) | plain_layer(draw, 1)


LLAMA: Final = Model(
    architecture="LlamaForCausalLM",
    proves="untied head",
    config=_CONFIG,
    vocabulary=LLAMA3_VOCABULARY,
    weights=_weights,
)

LLAMA_DYNAMIC: Final = Model(
    architecture="LlamaForCausalLM",
    proves="dynamic rotary angles",
    config=_CONFIG | {"rope_scaling": {"factor": 4.0, "type": "dynamic"}},
    vocabulary=LLAMA3_VOCABULARY,
    weights=_weights,
)

LLAMA3_ROPE: Final = Model(
    architecture="LlamaForCausalLM",
    proves="Llama 3's rotary angles, tied head",
    config=_CONFIG
    | {
        "rope_scaling": {
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 64,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
    },
    vocabulary=LLAMA3_VOCABULARY,
    weights=_tied_weights,
)
