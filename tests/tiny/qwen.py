"""Qwen2 (biased queries, keys and values; windows in upper layers; YaRN), Qwen3, and its experts."""

from typing import Final

from tests.tiny.model import (
    COMMON,
    EXPERTS,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    WINDOW,
    Draw,
    Model,
    Tensors,
    attention,
    ends,
    head_norms,
    norms,
    plain_layer,
)
from tests.tiny.vocabulary import Vocabulary

_EXPERT_SIZE: Final = 64

CHATML_VOCABULARY: Final = Vocabulary(
    specials=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    ends=["<|im_end|>"],
    template=(
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
)


def _biases(draw: Draw, layer: int) -> Tensors:
    at = f"model.layers.{layer}.self_attn"
    sizes = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}
    return {f"{at}.{name}_proj.bias": draw.bias(size) for name, size in sizes.items()}


def biased_attention(draw: Draw, layer: int) -> Tensors:
    return attention(draw, layer) | _biases(draw, layer)


def biased_layer(draw: Draw, layer: int) -> Tensors:
    biases = _biases(draw, layer)
    return plain_layer(draw, layer) | biases


def _qwen2_weights(draw: Draw) -> Tensors:
    return ends(draw) | biased_layer(draw, 0) | biased_layer(draw, 1)


def _qwen3_weights(draw: Draw) -> Tensors:
    tensors = ends(draw)
    for layer in range(2):
        tensors |= plain_layer(draw, layer) | head_norms(draw, layer)
    return tensors


def _mixture(draw: Draw, layer: int) -> Tensors:
    at = f"model.layers.{layer}.mlp"
    tensors = {f"{at}.gate.weight": draw.matrix(EXPERTS, HIDDEN)}
    for expert in range(EXPERTS):
        tensors |= {
            f"{at}.experts.{expert}.gate_proj.weight": draw.matrix(_EXPERT_SIZE, HIDDEN),
            f"{at}.experts.{expert}.up_proj.weight": draw.matrix(_EXPERT_SIZE, HIDDEN),
            f"{at}.experts.{expert}.down_proj.weight": draw.matrix(HIDDEN, _EXPERT_SIZE),
        }
    return tensors


def _mixture_weights(draw: Draw) -> Tensors:
    tensors = ends(draw)
    for layer in range(2):
        tensors |= norms(draw, layer, ("input_layernorm", "post_attention_layernorm"))
        tensors |= attention(draw, layer) | head_norms(draw, layer) | _mixture(draw, layer)
    return tensors


_QWEN2: Final = COMMON | {
    "attention_dropout": 0.0,
    "max_window_layers": 2,
    "model_type": "qwen2",
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "use_sliding_window": False,
}

QWEN2: Final = Model(
    architecture="Qwen2ForCausalLM",
    proves="biases",
    config=_QWEN2,
    vocabulary=CHATML_VOCABULARY,
    weights=_qwen2_weights,
)

QWEN2_WINDOW: Final = Model(
    architecture="Qwen2ForCausalLM",
    proves="a sliding window from `max_window_layers` on",
    config=_QWEN2 | {"max_window_layers": 1, "sliding_window": WINDOW, "use_sliding_window": True},
    vocabulary=CHATML_VOCABULARY,
    weights=_qwen2_weights,
    windows=(None, WINDOW),
)

QWEN2_YARN: Final = Model(
    architecture="Qwen2ForCausalLM",
    proves="YaRN",
    config=_QWEN2 | {"rope_scaling": {"factor": 8.0, "original_max_position_embeddings": 64, "type": "yarn"}},
    vocabulary=CHATML_VOCABULARY,
    weights=_qwen2_weights,
)

_QWEN3: Final = COMMON | {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": HEAD_DIM,
    "max_window_layers": 2,
    "rope_scaling": None,
    "sliding_window": None,
    "use_sliding_window": False,
}

QWEN3: Final = Model(
    architecture="Qwen3ForCausalLM",
    proves="norms of queries and keys",
    config=_QWEN3 | {"model_type": "qwen3"},
    vocabulary=CHATML_VOCABULARY,
    weights=_qwen3_weights,
)

QWEN3_MOE: Final = Model(
    architecture="Qwen3MoeForCausalLM",
    proves="experts, stored as one matrix each",
    config=_QWEN3
    | {
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": _EXPERT_SIZE,
        "norm_topk_prob": True,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "output_router_logits": False,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
    },
    vocabulary=CHATML_VOCABULARY,
    weights=_mixture_weights,
)
