"""Tiny checkpoints of masked diffusion models: LLaDA and Dream as published, and a plain Qwen3."""

from functools import cache
from pathlib import Path
from typing import Any, Final

from tests.tiny.block_diffusion import MASK, VOCABULARY, written
from tests.tiny.model import (
    COMMON,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INTERMEDIATE,
    KV_HEADS,
    MAX_POSITIONS,
    Draw,
    Tensors,
    ends,
    head_norms,
    plain_layer,
)
from tests.tiny.qwen import biased_layer
from tests.tiny.vocabulary import VOCAB_SIZE

MASK_ID: Final = VOCAB_SIZE - 1
"""An unused row of the vocabulary: of LLaDA and Dream `config.json` names the mask."""
LLADA: Final[dict[str, Any]] = {
    "activation_type": "silu",
    "alibi": False,
    "architectures": ["LLaDAModelLM"],
    "attention_dropout": 0.0,
    "attention_layer_norm": False,
    "auto_map": {
        "AutoConfig": "configuration_llada.LLaDAConfig",
        "AutoModel": "modeling_llada.LLaDAModelLM",
        "AutoModelForCausalLM": "modeling_llada.LLaDAModelLM",
    },
    "bias_for_layer_norm": False,
    "block_group_size": 1,
    "block_type": "llama",
    "d_model": HIDDEN,
    "embedding_size": VOCAB_SIZE,
    "include_bias": False,
    "include_qkv_bias": False,
    "init_fn": "mitchell",
    "input_emb_norm": False,
    "layer_norm_type": "rms",
    "mask_token_id": MASK_ID,
    "max_sequence_length": MAX_POSITIONS,
    "mlp_hidden_size": INTERMEDIATE,
    "mlp_ratio": 4,
    "model_type": "llada",
    "multi_query_attention": None,
    "n_heads": HEADS,
    "n_kv_heads": KV_HEADS,
    "n_layers": 2,
    "rms_norm_eps": 1e-5,
    "rope": True,
    "rope_full_precision": True,
    "rope_theta": 500000.0,
    "scale_logits": False,
    "torch_dtype": "float32",
    "vocab_size": VOCAB_SIZE,
    "weight_tying": False,
}
"""The `config.json` of LLaDA-8B with other sizes."""
DREAM: Final[dict[str, Any]] = COMMON | {
    "architectures": ["DreamModel"],
    "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_dream.DreamConfig",
        "AutoModel": "modeling_dream.DreamModel",
    },
    "mask_token_id": MASK_ID,
    "max_window_layers": 28,
    "model_type": "Dream",
    "rope_scaling": None,
    "sliding_window": None,
    "torch_dtype": "float32",
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": VOCAB_SIZE,
}
"""The `config.json` of Dream-7B with other sizes."""
MDLM: Final[dict[str, Any]] = COMMON | {
    "architectures": ["A2DQwen3LMHeadModel"],
    "attention_bias": False,
    "head_dim": HEAD_DIM,
    "model_type": "a2d-qwen3",
    "torch_dtype": "float32",
    "vocab_size": VOCAB_SIZE,
}
"""The `config.json` of dllm-hub's Qwen3-0.6B-diffusion-mdlm; its tokenizer names the mask."""
_LLADA_NAMES: Final = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ff_norm",
    "self_attn.q_proj": "q_proj",
    "self_attn.k_proj": "k_proj",
    "self_attn.v_proj": "v_proj",
    "self_attn.o_proj": "attn_out",
    "mlp.gate_proj": "ff_proj",
    "mlp.up_proj": "up_proj",
    "mlp.down_proj": "ff_out",
}
_LLADA_ENDS: Final = {"model.embed_tokens": "wte", "model.norm": "ln_f", "lm_head": "ff_out"}


@cache
def tiny_llada(seed: int = 0) -> Path:
    """A folder as LLaDA's are; built once per session, never to be written to."""
    draw = Draw(seed)
    tensors = ends(draw) | plain_layer(draw, 0) | plain_layer(draw, 1)
    return written("llada", LLADA, {_llada_name(name): tensor for name, tensor in tensors.items()})


@cache
def tiny_dream(seed: int = 0) -> Path:
    """A folder as Dream's are."""
    draw = Draw(seed)
    return written("dream", DREAM, ends(draw) | biased_layer(draw, 0) | biased_layer(draw, 1))


@cache
def tiny_mdlm(seed: int = 0) -> Path:
    """A folder as those of dllm-hub's `...-diffusion-mdlm` are."""
    draw = Draw(seed)
    tensors: Tensors = ends(draw)
    for layer in range(2):
        tensors |= plain_layer(draw, layer) | head_norms(draw, layer)
    return written("mdlm", MDLM, tensors)


def _llada_name(name: str) -> str:
    inner, _, last = name.rpartition(".")
    if inner in _LLADA_ENDS:
        return f"model.transformer.{_LLADA_ENDS[inner]}.{last}"
    _, _, layer, part = inner.split(".", 3)
    return f"model.transformer.blocks.{layer}.{_LLADA_NAMES[part]}.{last}"


__all__ = ["DREAM", "LLADA", "MASK", "MASK_ID", "MDLM", "VOCABULARY", "tiny_dream", "tiny_llada", "tiny_mdlm"]
