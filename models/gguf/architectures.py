"""GGUF's metadata and names of tensors in Hugging Face format, by architecture. Pure.

Sources: the specification of GGUF (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), and
llama.cpp's `convert_hf_to_gguf.py`, whose changes are reversed here.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from models.checkpoints.files import CheckpointError, UnsupportedArchitectureError

Metadata = Mapping[str, Any]
ROPE_FACTORS: Final = "rope_freqs.weight"
"""The tensor with a divisor of each rotary frequency: Llama 3.1's scaling, computed when it was converted."""


@dataclass(frozen=True, slots=True)
class _Architecture:
    """One of llama.cpp's architectures.

    Attributes:
        model_class: the class of transformers.
        model_type: its name in a config.
        is_permuted: rows of queries and keys are in pairs for another form of rotation.
        has_experts: its layers have experts.
        is_gemma: its layers have four norms, whose weights are stored with 1 added, and windows.
    """

    model_class: str
    model_type: str
    is_permuted: bool = False
    has_experts: bool = False
    is_gemma: bool = False


_ARCHITECTURES: Final[Mapping[str, _Architecture]] = MappingProxyType(
    {
        "llama": _Architecture("LlamaForCausalLM", "llama", is_permuted=True),
        "qwen2": _Architecture("Qwen2ForCausalLM", "qwen2"),
        "qwen3": _Architecture("Qwen3ForCausalLM", "qwen3"),
        "qwen3moe": _Architecture("Qwen3MoeForCausalLM", "qwen3_moe", has_experts=True),
        "gemma3": _Architecture("Gemma3ForCausalLM", "gemma3_text", is_gemma=True),
    }
)
_OUTSIDE: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYERS: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_IN_GEMMAS_LAYERS: Final = {
    **_IN_LAYERS,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA_PATTERN: Final = 6
"""Every so many layers of Gemma 3 one reads the whole text."""
_GEMMA_27B: Final = (62, 168)
"""The layers of Gemma 3 27B, whose queries are scaled otherwise, and by what: files do not say it."""
_OF_EXPERTS: Final = {
    "ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj",
}  # fmt: skip
_LAYER: Final = re.compile(r"^blk\.(\d+)\.(\w+)\.(weight|bias)$")
_SCALINGS: Final = frozenset({"linear", "yarn"})


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a file's tensor in the model.

    Attributes:
        names: the tensors that it holds, along its first axis if there are several: one for each expert.
        heads: the number of heads whose rows are to be put back in order; 0 for none.
        added: what was added to its numbers.
    """

    names: tuple[str, ...]
    heads: int = 0
    added: float = 0.0


@dataclass(frozen=True, slots=True)
class Model:
    """The model of a GGUF file.

    Attributes:
        config: the content of its `config.json`.
        places: of its tensors, by their names in the file.
    """

    config: dict[str, Any]
    places: Mapping[str, Place]


def model_of(
    metadata: Metadata, shapes: Mapping[str, tuple[int, ...]], rope_factors: list[float] | None = None
) -> Model:
    """The model that `metadata` and the `shapes` of tensors (outputs first) describe.

    `rope_factors` are the numbers in `ROPE_FACTORS`, if the file has it.

    Raises:
        UnsupportedArchitectureError: it is none of those that are served.
        CheckpointError: a key or a tensor is missing, or unknown.
    """
    name = metadata.get("general.architecture")
    architecture = _ARCHITECTURES.get(name) if isinstance(name, str) else None
    if architecture is None:
        raise UnsupportedArchitectureError(
            f"the architecture {name!r} of a GGUF file is not served: expected one of "
            f"{', '.join(sorted(_ARCHITECTURES))}; others are served from their folder in Hugging Face format"
        )
    keys = _Keys(metadata, str(name))
    if keys.get("expert_count") and not architecture.has_experts:
        raise UnsupportedArchitectureError(f"{name} with experts is not served from a GGUF file")
    config = _config(architecture, keys, shapes, rope_factors)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    places: dict[str, Place] = {}
    for tensor in shapes:
        found = _place(architecture, tensor, heads, config.get("num_experts", 0))
        if found is None:
            raise UnsupportedArchitectureError(
                f"the tensor {tensor!r} is none of {architecture.model_class}: files with adapters, draft "
                "heads or quantised activations are not served"
            )
        if found.names:
            places[tensor] = found
    _check(places, config)
    return Model(config, places)


@dataclass(frozen=True, slots=True)
class _Keys:
    """The keys of an architecture, without its name."""

    metadata: Metadata
    name: str

    def get(self, key: str) -> Any:
        return self.metadata.get(f"{self.name}.{key}")

    def number(self, key: str) -> int:
        found = self.get(key)
        if isinstance(found, bool) or not isinstance(found, int) or found < 1:
            raise CheckpointError(f"expected a positive integer in {self.name}.{key}, found {found!r:.80}")
        return found


def _config(
    architecture: _Architecture,
    keys: _Keys,
    shapes: Mapping[str, tuple[int, ...]],
    rope_factors: list[float] | None,
) -> dict[str, Any]:
    hidden, heads = keys.number("embedding_length"), keys.number("attention.head_count")
    embeddings = shapes.get("token_embd.weight")
    if embeddings is None:
        raise CheckpointError(
            "the tensor token_embd.weight is missing: expected the weights of a whole model"
        )
    head_dim = keys.get("attention.key_length") or hidden // heads
    length = keys.number("context_length")
    config: dict[str, Any] = {
        "architectures": [architecture.model_class],
        "model_type": architecture.model_type,
        "vocab_size": embeddings[0],
        "hidden_size": hidden,
        "num_hidden_layers": keys.number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.get("attention.head_count_kv") or heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": length,
        "rms_norm_eps": keys.get("attention.layer_norm_rms_epsilon"),
        "rope_theta": keys.get("rope.freq_base") or 10_000.0,
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "mlp_bias": "blk.0.ffn_down.bias" in shapes,
        "torch_dtype": "bfloat16",
    }
    for side in ("bos", "eos"):
        config[f"{side}_token_id"] = keys.metadata.get(f"tokenizer.ggml.{side}_token_id")
    if (keys.get("rope.dimension_count") or head_dim) != head_dim:
        raise UnsupportedArchitectureError(
            f"{keys.get('rope.dimension_count')} of {head_dim} dimensions are rotated, which is not served "
            "from a GGUF file"
        )
    if not isinstance(config["rms_norm_eps"], float):
        raise CheckpointError(
            f"expected a number in {keys.name}.attention.layer_norm_rms_epsilon, found none"
        )
    if (scaling := _scaling(keys, length, rope_factors)) is not None:
        config["rope_scaling"] = scaling
    if architecture.is_gemma:
        config |= _of_gemma(keys, head_dim)
    if architecture.has_experts:
        return config | _of_experts(keys)
    return config | {"intermediate_size": keys.number("feed_forward_length")}


def _of_gemma(keys: _Keys, head_dim: int) -> dict[str, Any]:
    layers, scale = _GEMMA_27B
    return {
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scale if keys.number("block_count") == layers else head_dim,
        "sliding_window": keys.number("attention.sliding_window"),
        "sliding_window_pattern": keys.get("attention.sliding_window_pattern") or _GEMMA_PATTERN,
        "rope_theta": keys.get("rope.freq_base") or 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
    }


def _of_experts(keys: _Keys) -> dict[str, Any]:
    width = keys.number("expert_feed_forward_length")
    return {
        "intermediate_size": keys.get("feed_forward_length") or width,
        "num_experts": keys.number("expert_count"),
        "num_experts_per_tok": keys.number("expert_used_count"),
        "moe_intermediate_size": width,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _scaling(keys: _Keys, length: int, rope_factors: list[float] | None) -> dict[str, Any] | None:
    """The scaling of rotary frequencies; None for none."""
    if rope_factors is not None:  # the form of longrope, with the same factors at every length
        return {
            "rope_type": "longrope",
            "short_factor": rope_factors,
            "long_factor": rope_factors,
            "factor": 1.0,
            "attention_factor": 1.0,
            "original_max_position_embeddings": length,
        }
    kind, factor = keys.get("rope.scaling.type"), keys.get("rope.scaling.factor")
    if kind in (None, "none") or not factor or factor == 1.0:
        return None
    if kind not in _SCALINGS:
        raise UnsupportedArchitectureError(
            f"{keys.name}.rope.scaling.type is {kind!r:.80}: expected none, linear or yarn"
        )
    found = {"rope_type": kind, "factor": float(factor)}
    if kind == "yarn":
        original = keys.get("rope.scaling.original_context_length")
        found["original_max_position_embeddings"] = original or int(length / factor)
    return found


def _place(architecture: _Architecture, tensor: str, heads: Mapping[str, int], experts: int) -> Place | None:
    """The place of a tensor, without names if it follows from the config; None if it has none."""
    added = 1.0 if architecture.is_gemma and tensor.endswith("norm.weight") else 0.0
    if tensor == ROPE_FACTORS:
        return Place(())
    if tensor in _OUTSIDE:
        return Place((_OUTSIDE[tensor],), added=added)
    found = _LAYER.match(tensor)
    if found is None:
        return None
    layer, kind, end = found.groups()
    names = _IN_GEMMAS_LAYERS if architecture.is_gemma else _IN_LAYERS
    if kind in names:
        name = f"model.layers.{layer}.{names[kind]}.{end}"
        return Place((name,), heads.get(kind, 0) if architecture.is_permuted else 0, added)
    if kind in _OF_EXPERTS and experts:
        within = f"model.layers.{layer}.mlp.experts"
        return Place(tuple(f"{within}.{one}.{_OF_EXPERTS[kind]}.{end}" for one in range(experts)))
    return None


def _check(places: Mapping[str, Place], config: Mapping[str, Any]) -> None:
    """Every layer has the same tensors as the first one."""
    kinds = {name.partition("blk.0.")[2] for name in places if name.startswith("blk.0.")}
    for layer in range(config["num_hidden_layers"]):
        missing = sorted(kind for kind in kinds if f"blk.{layer}.{kind}" not in places)
        if missing or not kinds:
            raise CheckpointError(
                f"layer {layer} lacks {', '.join(missing) or 'all tensors'}: expected what the first one "
                "has; is a part of the model missing?"
            )
