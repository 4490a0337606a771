"""Mistral 7B as it was first (a window in every layer), and Mixtral."""

from typing import Final

from tests.tiny.model import (
    COMMON,
    EXPERTS,
    HIDDEN,
    INTERMEDIATE,
    WINDOW,
    Draw,
    Model,
    Tensors,
    attention,
    ends,
    norms,
    plain_layer,
)
from tests.tiny.vocabulary import Vocabulary

_VOCABULARY: Final = Vocabulary(
    specials=["<unk>", "<s>", "</s>"],
    bos="<s>",
    ends=["</s>"],
    template=(
        "{{ bos_token }}{% for message in messages %}"
        "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate user/assistant/...') }}{% endif %}"
        "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
        "{% else %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}"
    ),
    pieces=True,
    leads_with_space=True,
)

_CONFIG: Final = COMMON | {"attention_dropout": 0.0, "rms_norm_eps": 1e-5}


def _weights(draw: Draw) -> Tensors:
    return ends(draw) | plain_layer(draw, 0) | plain_layer(draw, 1)


def mixture(draw: Draw, layer: int) -> Tensors:
    """Experts and their gate."""
    at = f"model.layers.{layer}.block_sparse_moe"
    tensors = {f"{at}.gate.weight": draw.matrix(EXPERTS, HIDDEN)}
    for expert in range(EXPERTS):
        tensors |= {
            f"{at}.experts.{expert}.w1.weight": draw.matrix(INTERMEDIATE, HIDDEN),
            f"{at}.experts.{expert}.w2.weight": draw.matrix(HIDDEN, INTERMEDIATE),
            f"{at}.experts.{expert}.w3.weight": draw.matrix(INTERMEDIATE, HIDDEN),
        }
    return tensors


def _mixture_weights(draw: Draw) -> Tensors:
    tensors = ends(draw)
    for layer in range(2):
        tensors |= norms(draw, layer, ("input_layernorm", "post_attention_layernorm"))
        tensors |= attention(draw, layer) | mixture(draw, layer)
    return tensors


MISTRAL: Final = Model(
    architecture="MistralForCausalLM",
    proves="a window in every layer, as in the first release",
    config=_CONFIG | {"model_type": "mistral", "sliding_window": WINDOW},
    vocabulary=_VOCABULARY,
    weights=_weights,
    windows=(WINDOW, WINDOW),
)

MIXTRAL: Final = Model(
    architecture="MixtralForCausalLM",
    proves="experts under their published names (`w1`, `w2`, `w3`)",
    config=_CONFIG
    | {
        "model_type": "mixtral",
        "num_experts_per_tok": 2,
        "num_local_experts": EXPERTS,
        "output_router_logits": True,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
    },
    vocabulary=_VOCABULARY,
    weights=_mixture_weights,
)
