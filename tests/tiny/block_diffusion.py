"""Tiny checkpoints of block diffusion models: LLaDA2 under its published names, and a block-causal Qwen3.

Random weights. LLaDA2's layers: a dense one and one of experts in groups, with a shared expert, a bias of the
experts' choice, norms of queries and keys, and angles on half of a head.
"""

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from tests.tiny.files import write_json, write_weights
from tests.tiny.model import (
    COMMON,
    EXPERTS,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INTERMEDIATE,
    KV_HEADS,
    Draw,
    Tensors,
    ends,
    head_norms,
    plain_layer,
)
from tests.tiny.qwen import CHATML_VOCABULARY
from tests.tiny.vocabulary import VOCAB_SIZE, Vocabulary, write_tokenizer

MASK: Final = "<|mask|>"
VOCABULARY: Final = Vocabulary(
    specials=[*CHATML_VOCABULARY.specials, MASK],
    ends=CHATML_VOCABULARY.ends,
    template=CHATML_VOCABULARY.template,
)
BLOCK: Final = 8
EXPERT_SIZE: Final = 32

LLADA2: Final[dict[str, Any]] = {
    "architectures": ["LLaDA2MoeModelLM"],
    "auto_map": {
        "AutoConfig": "configuration_llada2_moe.LLaDA2MoeConfig",
        "AutoModelForCausalLM": "modeling_llada2_moe.LLaDA2MoeModelLM",
    },
    "attention_dropout": 0.0,
    "embedding_dropout": 0.0,
    "first_k_dense_replace": 1,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "max_position_embeddings": 512,
    "model_type": "llada2_moe",
    "moe_intermediate_size": EXPERT_SIZE,
    "moe_router_enable_expert_bias": True,
    "n_group": 2,
    "norm_head": False,
    "num_attention_heads": HEADS,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": KV_HEADS,
    "num_shared_experts": 1,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 600000.0,
    "routed_scaling_factor": 2.5,
    "router_dtype": "fp32",
    "score_function": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "torch_dtype": "float32",
    "use_bias": False,
    "use_qk_norm": True,
    "use_qkv_bias": False,
    "use_rmsnorm": True,
    "use_sliding_window": False,
    "vocab_size": VOCAB_SIZE,
}
"""The `config.json`, with the keys that published checkpoints have."""

_QWEN3: Final[dict[str, Any]] = COMMON | {
    "architectures": ["A2DQwen3LMHeadModel"],
    "attention_bias": False,
    "head_dim": HEAD_DIM,
    "model_type": "a2d-qwen3",
    "torch_dtype": "float32",
    "vocab_size": VOCAB_SIZE,
}

_folders: Final[list[TemporaryDirectory[str]]] = []  # they live as long as the session


@cache
def tiny_llada2(seed: int = 0) -> Path:
    """A folder as LLaDA2's are; built once per session, never to be written to."""
    return written("llada2", LLADA2, llada2_weights(Draw(seed)))


@cache
def tiny_bd3lm(seed: int = 0, block: int = BLOCK) -> Path:
    """A folder as those of dllm-hub's `...-diffusion-bd3lm` are, of a Qwen3 in blocks of 8."""
    return written("bd3lm", _QWEN3 | {"block_size": block}, _qwen3_weights(Draw(seed)))


@cache
def tiny_verifier(seed: int = 3) -> Path:
    """A Qwen3 that decodes token by token, with the tokenizer of all tiny diffusion models."""
    config = _QWEN3 | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    return written("verifier", config, _qwen3_weights(Draw(seed)))


def _qwen3_weights(draw: Draw) -> Tensors:
    tensors = ends(draw)
    for layer in range(2):
        tensors |= plain_layer(draw, layer) | head_norms(draw, layer)
    return tensors


def llada2_weights(draw: Draw) -> Tensors:
    """The tensors under their published names."""
    tensors = ends(draw)
    tensors["model.word_embeddings.weight"] = tensors.pop("model.embed_tokens.weight")
    for layer in range(2):
        at = f"model.layers.{layer}"
        tensors |= {
            f"{at}.input_layernorm.weight": draw.norm(HIDDEN),
            f"{at}.post_attention_layernorm.weight": draw.norm(HIDDEN),
            f"{at}.attention.query_key_value.weight": draw.matrix((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
            f"{at}.attention.dense.weight": draw.matrix(HIDDEN, HEADS * HEAD_DIM),
            f"{at}.attention.query_layernorm.weight": draw.norm(HEAD_DIM),
            f"{at}.attention.key_layernorm.weight": draw.norm(HEAD_DIM),
        }
    tensors |= _gated(draw, "model.layers.0.mlp", INTERMEDIATE)
    at = "model.layers.1.mlp"
    tensors |= {
        f"{at}.gate.weight": draw.matrix(EXPERTS, HIDDEN),
        f"{at}.gate.expert_bias": draw.bias(EXPERTS),
    }
    tensors |= _gated(draw, f"{at}.shared_experts", EXPERT_SIZE)
    for expert in range(EXPERTS):
        tensors |= _gated(draw, f"{at}.experts.{expert}", EXPERT_SIZE)
    return tensors


def _gated(draw: Draw, at: str, size: int) -> Tensors:
    return {
        f"{at}.gate_proj.weight": draw.matrix(size, HIDDEN),
        f"{at}.up_proj.weight": draw.matrix(size, HIDDEN),
        f"{at}.down_proj.weight": draw.matrix(HIDDEN, size),
    }


def written(name: str, config: dict[str, Any], tensors: Tensors) -> Path:
    temporary = TemporaryDirectory(prefix=f"dalsegno-{name}-")
    _folders.append(temporary)
    folder = Path(temporary.name)
    ids = write_tokenizer(folder, VOCABULARY)
    named = json.loads((folder / "tokenizer_config.json").read_text())
    write_json(folder / "tokenizer_config.json", named | {"mask_token": MASK})
    end = ids[VOCABULARY.ends[-1]]
    write_json(folder / "config.json", config | {"eos_token_id": end, "pad_token_id": end})
    write_json(folder / "generation_config.json", {"do_sample": False, "eos_token_id": end})
    write_weights(folder, tensors, "F32", 1)
    return folder
