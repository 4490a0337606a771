"""LLaDA2's checkpoints as transformers' GLM 4.5: the config and the names of the tensors.

The layers are the same: norms of queries and keys, rotary angles on a part of each head, sigmoid scores of
the experts with a bias that chooses and does not weigh, groups of experts, and shared experts. The files have
other names, and one matrix of queries, keys and values.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeForCausalLM

from models.checkpoints.files import CheckpointError, UnsupportedArchitectureError
from models.transformers_lm.architecture import config_of
from models.transformers_lm.renames import Published

MODEL_TYPE: Final = "llada2_moe"
_SAME_KEYS: Final = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_act",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "tie_word_embeddings",
    "moe_intermediate_size",
    "num_experts_per_tok",
    "n_group",
    "topk_group",
    "routed_scaling_factor",
    "first_k_dense_replace",
    "use_qk_norm",
    "eos_token_id",
    "pad_token_id",
)
"""Keys that mean the same in both."""
_NAMES: Final = (
    ("model.word_embeddings.", "model.embed_tokens."),
    (".attention.dense.", ".self_attn.o_proj."),
    (".attention.query_layernorm.", ".self_attn.q_norm."),
    (".attention.key_layernorm.", ".self_attn.k_norm."),
    (".mlp.gate.expert_bias", ".mlp.gate.e_score_correction_bias"),
)
"""Parts of the names: as published, and of the class."""
_FUSED: Final = ".attention.query_key_value."
_REFUSED: Final = {
    "use_bias": "a bias after attention",
    "norm_head": "a normalised head",
    "use_sliding_window": "a sliding window",
}
"""Keys that turn on what the class cannot compute."""


def published(raw: Mapping[str, Any], checkpoint: Path) -> Published:
    """Translate the `config.json` of a checkpoint.

    Raises:
        CheckpointError: a key is missing or invalid.
        UnsupportedArchitectureError: the checkpoint has a feature that is not computed.
    """
    for key, what in _REFUSED.items():
        if raw.get(key):
            raise UnsupportedArchitectureError(
                f"{checkpoint}: LLaDA2 with {what} ({key}) is not served: expected {key} to be false, as in "
                "the published checkpoints"
            )
    if not raw.get("num_shared_experts") or raw.get("score_function", "sigmoid") != "sigmoid":
        raise UnsupportedArchitectureError(
            f"{checkpoint}: expected shared experts (num_shared_experts) and sigmoid scores "
            "(score_function), as in the published LLaDA2 checkpoints, found "
            f"{raw.get('num_shared_experts')!r} and {raw.get('score_function')!r}"
        )
    sizes = _head_sizes(raw, checkpoint)
    translated = {key: raw[key] for key in _SAME_KEYS if raw.get(key) is not None} | {
        "model_type": "glm4_moe",
        "head_dim": sizes["head_dim"],
        "attention_bias": bool(raw.get("use_qkv_bias")),
        "use_qk_norm": raw.get("use_qk_norm", True),
        "partial_rotary_factor": raw.get("partial_rotary_factor", 0.5),
        "n_routed_experts": raw.get("num_experts"),
        "n_shared_experts": raw["num_shared_experts"],
        "norm_topk_prob": raw.get("num_experts_per_tok", 1) > 1,
        "first_k_dense_replace": raw.get("first_k_dense_replace", 0),
    }
    config = config_of(Glm4MoeForCausalLM, translated, checkpoint)
    rows = (sizes["queries"], sizes["keys"], sizes["keys"])
    return Published(model_class=Glm4MoeForCausalLM, config=config, rule=lambda name: _tensors_in(name, rows))


def _head_sizes(raw: Mapping[str, Any], checkpoint: Path) -> dict[str, int]:
    """The numbers of a head, of all queries and of all keys of a token."""
    try:
        heads, groups, hidden = (
            int(raw[key]) for key in ("num_attention_heads", "num_key_value_heads", "hidden_size")
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{checkpoint / 'config.json'}: expected num_attention_heads, num_key_value_heads and "
            f"hidden_size, found an error at {error}; use the file that was published with the weights"
        ) from error
    head = int(raw.get("head_dim") or hidden // heads)
    return {"head_dim": head, "queries": heads * head, "keys": groups * head}


def _tensors_in(name: str, rows: tuple[int, int, int]) -> Mapping[str, int]:
    """The tensors of the class that a stored tensor holds, and the rows of each."""
    if _FUSED in name:
        layer, last = name.split(_FUSED)
        parts = (f"{layer}.self_attn.{part}_proj.{last}" for part in "qkv")
        return dict(zip(parts, rows, strict=True))
    for stored, own in _NAMES:
        name = name.replace(stored, own)
    return {name: 0}
