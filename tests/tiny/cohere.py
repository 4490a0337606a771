"""Command R and R7B: attention and MLP side by side, scaled logits; in R7B, layers go without positions."""

from typing import Final

from tests.tiny.model import (
    COMMON,
    HEAD_DIM,
    WINDOW,
    Draw,
    Model,
    Tensors,
    attention,
    mlp,
    norms,
    signed_ends,
)
from tests.tiny.vocabulary import Vocabulary

_VOCABULARY: Final = Vocabulary(
    specials=[
        "<PAD>",
        "<BOS_TOKEN>",
        "<|START_OF_TURN_TOKEN|>",
        "<|END_OF_TURN_TOKEN|>",
        "<|USER_TOKEN|>",
        "<|CHATBOT_TOKEN|>",
        "<|SYSTEM_TOKEN|>",
    ],
    bos="<BOS_TOKEN>",
    ends=["<|END_OF_TURN_TOKEN|>"],
    template=(
        "{{ bos_token }}{% for message in messages %}{{ '<|START_OF_TURN_TOKEN|>' }}"
        "{{ {'user': '<|USER_TOKEN|>', 'system': '<|SYSTEM_TOKEN|>', 'assistant': '<|CHATBOT_TOKEN|>'}"
        "[message['role']] + message['content'] + '<|END_OF_TURN_TOKEN|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}"
    ),
)


def _weights(draw: Draw) -> Tensors:
    tensors = signed_ends(draw)
    for layer in range(2):
        tensors |= norms(draw, layer, ("input_layernorm",)) | attention(draw, layer) | mlp(draw, layer)
    return tensors


COHERE2: Final = Model(
    architecture="Cohere2ForCausalLM",
    proves="parallel blocks, scaled logits, windows",
    config={key: value for key, value in COMMON.items() if key not in {"rms_norm_eps", "tie_word_embeddings"}}
    | {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "cache_implementation": "hybrid",
        "head_dim": HEAD_DIM,
        "layer_norm_eps": 1e-5,
        "layer_switch": 2,
        "logit_scale": 2.0,
        "model_type": "cohere2",
        "order_of_interleaved_layers": "local_attn_first",
        "pad_token_id": 0,
        "position_embedding_type": "rope_gptj",
        "rope_scaling": None,
        "rotary_pct": 1.0,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 2,
        "use_embedding_sharing": True,
        "use_gated_activation": True,
        "use_parallel_block": True,
        "use_parallel_embedding": True,
    },
    vocabulary=_VOCABULARY,
    weights=_weights,
    windows=(WINDOW, None),
)

COHERE: Final = Model(
    architecture="CohereForCausalLM",
    proves="parallel blocks, scaled logits",
    config={key: value for key, value in COMMON.items() if key not in {"rms_norm_eps", "tie_word_embeddings"}}
    | {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "layer_norm_eps": 1e-5,
        "logit_scale": 2.0,
        "model_type": "cohere",
        "pad_token_id": 0,
        "use_qk_norm": False,
    },
    vocabulary=_VOCABULARY,
    weights=_weights,
)
