"""Gemma: scaled embeddings tied to the head, norms that store what is added to 1; windows from Gemma 2 on."""

from dataclasses import replace
from typing import Final

from tests.tiny.model import (
    COMMON,
    HEAD_DIM,
    HIDDEN,
    WINDOW,
    Draw,
    Model,
    Tensors,
    attention,
    head_norms,
    mlp,
    norms,
    signed_ends,
)
from tests.tiny.vocabulary import Vocabulary

_VOCABULARY: Final = Vocabulary(
    specials=["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"],
    bos="<bos>",
    ends=["<eos>"],
    # No system role, turns that alternate, and the assistant is called model.
    template=(
        "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
        "{{ raise_exception('System role not supported') }}{% endif %}"
        "{% for message in messages %}"
        "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate user/assistant/...') }}{% endif %}"
        "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
        "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
    ),
    pieces=True,
)
TUNED_VOCABULARY: Final = replace(_VOCABULARY, ends=["<eos>", "<end_of_turn>"])

FOUR_NORMS: Final = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
_EMBEDDINGS: Final = 1 / HIDDEN**0.5
"""They are multiplied by the root of the hidden size, and are the head as well."""


def _ends(draw: Draw) -> Tensors:
    return signed_ends(draw, centre=-1, scale=_EMBEDDINGS)


def _gemma_weights(draw: Draw) -> Tensors:
    tensors = _ends(draw)
    for layer in range(2):
        tensors |= norms(draw, layer, ("input_layernorm", "post_attention_layernorm"), centre=0)
        tensors |= attention(draw, layer) | mlp(draw, layer)
    return tensors


def _gemma2_weights(draw: Draw) -> Tensors:
    tensors = _ends(draw)
    for layer in range(2):
        tensors |= norms(draw, layer, FOUR_NORMS, centre=0) | attention(draw, layer) | mlp(draw, layer)
    return tensors


def _gemma3_weights(draw: Draw) -> Tensors:
    tensors = _ends(draw)
    for layer in range(3):
        tensors |= norms(draw, layer, FOUR_NORMS, centre=0) | attention(draw, layer)
        tensors |= head_norms(draw, layer, centre=0) | mlp(draw, layer)
    return tensors


_GEMMA: Final = {key: value for key, value in COMMON.items() if key != "tie_word_embeddings"} | {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": HEAD_DIM,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "pad_token_id": 0,
}

GEMMA: Final = Model(
    architecture="GemmaForCausalLM",
    proves="scaled embeddings, norms around 1, a template without a system role",
    config=_GEMMA
    | {"hidden_act": "gelu", "model_type": "gemma", "num_key_value_heads": 2, "rope_scaling": None},
    vocabulary=_VOCABULARY,
    weights=_gemma_weights,
)

GEMMA2: Final = Model(
    architecture="Gemma2ForCausalLM",
    proves="softcapped scores and logits; windows in every second layer",
    config=_GEMMA
    | {
        "attn_logit_softcapping": 3.0,  # 50 as published; scores are smaller here
        "cache_implementation": "hybrid",
        "final_logit_softcapping": 5.0,
        "model_type": "gemma2",
        "query_pre_attn_scalar": 8,
        "sliding_window": WINDOW,
        "sliding_window_size": WINDOW,
    },
    vocabulary=TUNED_VOCABULARY,
    weights=_gemma2_weights,
    windows=(WINDOW, None),
)

GEMMA3: Final = Model(
    architecture="Gemma3ForCausalLM",
    proves="two kinds of angles; windows in all layers but every sixth (here: third)",
    config=_GEMMA
    | {
        "attn_logit_softcapping": None,
        "cache_implementation": "hybrid",
        "final_logit_softcapping": None,
        "model_type": "gemma3_text",
        "num_hidden_layers": 3,
        "query_pre_attn_scalar": 8,
        "rope_local_base_freq": 10000,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 3,
    },
    vocabulary=TUNED_VOCABULARY,
    weights=_gemma3_weights,
    windows=(WINDOW, WINDOW, None),
)
