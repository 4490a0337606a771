"""LLaDA's checkpoints as transformers' Llama: the config, and the names of the tensors.

The layers are the same, but every token sees all others. The published code is not run.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from transformers.models.llama.modeling_llama import LlamaForCausalLM

from models.checkpoints.files import CheckpointError, UnsupportedArchitectureError
from models.transformers_lm.architecture import config_of
from models.transformers_lm.renames import Published

MODEL_TYPE: Final = "llada"
_EXPECTED: Final[Mapping[str, tuple[Any, ...]]] = {
    "activation_type": ("silu",),
    "alibi": (False,),
    "attention_layer_norm": (False,),
    "bias_for_layer_norm": (False, None),
    "block_type": ("llama",),
    "clip_qkv": (None,),
    "include_bias": (False,),
    "include_qkv_bias": (False,),
    "input_emb_norm": (False,),
    "layer_norm_type": ("rms",),
    "multi_query_attention": (False, None),
    "rope": (True,),
    "scale_logits": (False,),
}
"""Keys of `config.json`, and the values with which the layers are Llama's."""
_DEFAULTS: Final[Mapping[str, Any]] = {
    "activation_type": "swiglu",
    "block_type": "sequential",
    "layer_norm_type": "default",
    "rope": False,
}
"""The values that the published configuration class assumes for absent keys, where that is not Llama's."""
_SIZES: Final = ("d_model", "n_heads", "n_layers", "mlp_hidden_size", "vocab_size", "max_sequence_length")
_NAMES: Final[Mapping[str, str]] = {
    "wte": "model.embed_tokens",
    "ln_f": "model.norm",
    "ff_out": "lm_head",
}
_LAYER_NAMES: Final[Mapping[str, str]] = {
    "attn_norm": "input_layernorm",
    "ff_norm": "post_attention_layernorm",
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "attn_out": "self_attn.o_proj",
    "ff_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "ff_out": "mlp.down_proj",
}
_PREFIX: Final = "model.transformer."


def published(raw: Mapping[str, Any], checkpoint: Path) -> Published:
    """Translate the `config.json` of a checkpoint.

    Raises:
        CheckpointError: a key is missing.
        UnsupportedArchitectureError: the checkpoint has layers that are not Llama's.
    """
    for key, allowed in _EXPECTED.items():
        found = raw.get(key, _DEFAULTS.get(key, allowed[0]))
        if found not in allowed:
            raise UnsupportedArchitectureError(
                f"{checkpoint}: LLaDA with {key} {found!r} is not served: expected {allowed[0]!r}, as in "
                "the published checkpoints"
            )
    if missing := [key for key in _SIZES if not isinstance(raw.get(key), int)]:
        raise CheckpointError(
            f"{checkpoint / 'config.json'}: expected numbers for {', '.join(missing)}, found "
            f"{', '.join(repr(raw.get(key)) for key in missing)}; use the file that was published with the "
            "weights"
        )
    translated = {
        "model_type": "llama",
        "vocab_size": raw.get("embedding_size") or raw["vocab_size"],
        "hidden_size": raw["d_model"],
        "intermediate_size": raw["mlp_hidden_size"],
        "num_hidden_layers": raw["n_layers"],
        "num_attention_heads": raw["n_heads"],
        "num_key_value_heads": raw.get("n_kv_heads") or raw["n_heads"],
        "max_position_embeddings": raw["max_sequence_length"],
        "rms_norm_eps": raw.get("rms_norm_eps", 1e-5),
        "rope_theta": raw.get("rope_theta", 10_000.0),
        "tie_word_embeddings": bool(raw.get("weight_tying", True)),
        "eos_token_id": raw.get("eos_token_id"),
        "pad_token_id": raw.get("pad_token_id"),
    }
    config = config_of(LlamaForCausalLM, translated, checkpoint)
    return Published(model_class=LlamaForCausalLM, config=config, rule=_tensors_in)


def _tensors_in(name: str) -> Mapping[str, int]:
    """The tensor of the class that a stored tensor holds."""
    inner, _, last = name.removeprefix(_PREFIX).rpartition(".")
    if not inner.startswith("blocks."):
        return {f"{_NAMES.get(inner, inner)}.{last}": 0}
    _, layer, part = inner.split(".", 2)
    return {f"model.layers.{layer}.{_LAYER_NAMES.get(part, part)}.{last}": 0}
