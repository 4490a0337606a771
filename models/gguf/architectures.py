"""GGUF's metadata and names of tensors in Hugging Face format, by architecture. Pure.

Sources: the specification of GGUF (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), and
llama.cpp's `convert_hf_to_gguf.py`, whose changes are reversed here.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import product
from math import inf
from types import MappingProxyType
from typing import Any, Final

from models.checkpoints.files import CheckpointError, UnsupportedArchitectureError

Metadata = Mapping[str, Any]
ROPE_FACTORS: Final = "rope_freqs.weight"
"""The tensor with a divisor of each rotary frequency: Llama 3.1's scaling, computed when it was converted."""
SHORT_FACTORS, LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"
"""The same for short texts and for long ones."""


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
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
"""The modules of a layer; `{}` is the number of an expert."""
_ALL_NORMS: Final = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_MIXTRAL: Final = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
_SHARED_EXPERT: Final = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_GPT_OSS: Final = {
    "attn_sinks": "self_attn.sinks",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.router",
}
_MERGED: Final = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}
"""The parts of experts whose rows alternate in gpt-oss's matrices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Architecture:
    """One of llama.cpp's architectures.

    Attributes:
        model_class: the class of transformers.
        model_type: its name in a config.
        modules: of a layer, where they have other names than in `_IN_LAYERS`.
        is_permuted: rows of queries and keys are in pairs for another form of rotation.
        has_experts: its layers have experts.
        merges_experts: its experts are merged as those of gpt-oss.
        norm_offset: what was added to the weights of norms.
        is_phi: angles may be those of a part of a head, with factors of their own for long texts.
        config: what is special in its config.
    """

    model_class: str
    model_type: str
    modules: Mapping[str, str] = field(default_factory=dict)
    is_permuted: bool = False
    has_experts: bool = False
    merges_experts: bool = False
    norm_offset: float = 0.0
    is_phi: bool = False
    config: "Callable[[_Keys, Mapping[str, Any]], dict[str, Any]]" = lambda *_: {}


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


_GELU: Final = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
_GEMMA_PATTERN: Final = 6
"""Every so many layers of Gemma 3 one reads the whole text."""
_GEMMA2_27B: Final = (46, 144)
_GEMMA3_27B: Final = (62, 168)
"""The layers of those whose queries are scaled otherwise, and by what: files do not say it."""


def _of_gemma(config: Mapping[str, Any], largest: tuple[int, int]) -> dict[str, Any]:
    layers, scale = largest
    is_largest = config["num_hidden_layers"] == layers
    return {**_GELU, "query_pre_attn_scalar": scale if is_largest else config["head_dim"]}


def _of_gemma2(keys: _Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    return _of_gemma(config, _GEMMA2_27B) | {
        # Old files lack these, and mean those of the published models, as in llama.cpp.
        "sliding_window": keys.get("attention.sliding_window") or 4096,
        "attn_logit_softcapping": keys.get("attn_logit_softcapping") or 50.0,
        "final_logit_softcapping": keys.get("final_logit_softcapping") or 30.0,
    }


def _of_gemma3(keys: _Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    return _of_gemma(config, _GEMMA3_27B) | {
        "sliding_window": keys.number("attention.sliding_window"),
        "sliding_window_pattern": keys.get("attention.sliding_window_pattern") or _GEMMA_PATTERN,
        "rope_theta": keys.get("rope.freq_base") or 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
    }


def _of_phi3(keys: _Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    length = config["max_position_embeddings"]
    turned = keys.get("rope.dimension_count") or config["head_dim"]
    return {
        "original_max_position_embeddings": keys.get("rope.scaling.original_context_length") or length,
        "partial_rotary_factor": turned / config["head_dim"],
        "sliding_window": keys.get("attention.sliding_window") or None,
    }


def _of_olmo2(keys: _Keys, _: Mapping[str, Any]) -> dict[str, Any]:
    if keys.get("attention.sliding_window"):
        raise UnsupportedArchitectureError(
            "olmo2 with windows (OLMo 3) is not served from a GGUF file: expected its folder in Hugging Face "
            "format"
        )
    return {}


def _of_granite(keys: _Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "attention_multiplier": keys.get("attention.scale") or config["head_dim"] ** -0.5,
        "embedding_multiplier": keys.get("embedding_scale") or 1.0,
        "residual_multiplier": keys.get("residual_scale") or 1.0,
        "logits_scaling": keys.get("logit_scale") or 1.0,
    }


def _of_olmoe(keys: _Keys, _: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "num_experts": keys.number("expert_count"),
        "num_experts_per_tok": keys.number("expert_used_count"),
        "norm_topk_prob": False,
    }


def _of_experts(keys: _Keys, _: Mapping[str, Any]) -> dict[str, Any]:
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


def _of_qwen2_moe(keys: _Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    shared = keys.number("expert_shared_feed_forward_length")
    return _of_experts(keys, config) | {"norm_topk_prob": False, "shared_expert_intermediate_size": shared}


def _of_mixtral(keys: _Keys, _: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "num_local_experts": keys.number("expert_count"),
        "num_experts_per_tok": keys.number("expert_used_count"),
        "sliding_window": keys.get("attention.sliding_window"),
    }


def _of_gpt_oss(keys: _Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    scaling = config.get("rope_scaling")
    return {
        "rope_scaling": scaling and {**scaling, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
        "intermediate_size": keys.number("expert_feed_forward_length"),
        "num_local_experts": keys.number("expert_count"),
        "num_experts_per_tok": keys.number("expert_used_count"),
        "sliding_window": keys.number("attention.sliding_window"),
        "swiglu_limit": 7.0,
    }


_MIXTRAL_8X7B: Final = _Architecture(
    model_class="MixtralForCausalLM",
    model_type="mixtral",
    modules=_MIXTRAL,
    is_permuted=True,
    has_experts=True,
    config=_of_mixtral,
)
_ARCHITECTURES: Final[Mapping[str, _Architecture]] = MappingProxyType(
    {
        "gemma": _Architecture(
            model_class="GemmaForCausalLM", model_type="gemma", norm_offset=1.0, config=lambda *_: _GELU
        ),
        "gemma2": _Architecture(
            model_class="Gemma2ForCausalLM",
            model_type="gemma2",
            modules=_ALL_NORMS,
            norm_offset=1.0,
            config=_of_gemma2,
        ),
        "gemma3": _Architecture(
            model_class="Gemma3ForCausalLM",
            model_type="gemma3_text",
            modules=_ALL_NORMS,
            norm_offset=1.0,
            config=_of_gemma3,
        ),
        "gpt-oss": _Architecture(
            model_class="GptOssForCausalLM",
            model_type="gpt_oss",
            modules=_GPT_OSS,
            has_experts=True,
            merges_experts=True,
            config=_of_gpt_oss,
        ),
        "granite": _Architecture(
            model_class="GraniteForCausalLM", model_type="granite", is_permuted=True, config=_of_granite
        ),
        "llama": _Architecture(model_class="LlamaForCausalLM", model_type="llama", is_permuted=True),
        "olmo2": _Architecture(
            model_class="Olmo2ForCausalLM", model_type="olmo2", modules=_ALL_NORMS, config=_of_olmo2
        ),
        "olmoe": _Architecture(
            model_class="OlmoeForCausalLM", model_type="olmoe", has_experts=True, config=_of_olmoe
        ),
        "phi3": _Architecture(
            model_class="Phi3ForCausalLM",
            model_type="phi3",
            modules={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
            is_phi=True,
            config=_of_phi3,
        ),
        "qwen2": _Architecture(model_class="Qwen2ForCausalLM", model_type="qwen2"),
        "qwen2moe": _Architecture(
            model_class="Qwen2MoeForCausalLM",
            model_type="qwen2_moe",
            modules=_SHARED_EXPERT,
            has_experts=True,
            config=_of_qwen2_moe,
        ),
        "qwen3": _Architecture(model_class="Qwen3ForCausalLM", model_type="qwen3"),
        "qwen3moe": _Architecture(
            model_class="Qwen3MoeForCausalLM", model_type="qwen3_moe", has_experts=True, config=_of_experts
        ),
        "smollm3": _Architecture(model_class="SmolLM3ForCausalLM", model_type="smollm3", is_permuted=True),
    }
)
_OUTSIDE: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER: Final = re.compile(r"^blk\.(\d+)\.(\w+)\.(weight|bias)$")
_OF_EXPERTS: Final = re.compile(r"^ffn_(gate|up|down)_exps$")
_OLD_EXPERT: Final = re.compile(r"^blk\.\d+\.ffn_(gate|up|down)\.\d+\.weight$")
_SCALINGS: Final = frozenset({"linear", "yarn"})


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a file's tensor in the model.

    Attributes:
        names: the tensors that it holds, along its first axis if there are several: one for each expert.
            There are none if it is a part of another one (`Model.merged`), or in the config.
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
        merged: those that hold the experts of a layer in the form of gpt-oss, with the tensors of the file
            whose outputs alternate in them.
    """

    config: dict[str, Any]
    places: Mapping[str, Place]
    merged: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def model_of(
    metadata: Metadata,
    shapes: Mapping[str, tuple[int, ...]],
    factors: Mapping[str, list[float]] = MappingProxyType({}),
) -> Model:
    """The model that `metadata` and the `shapes` of tensors (outputs first) describe.

    `factors` are the numbers of the tensors with divisors of frequencies.

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
    if keys.get("expert_count") and name == "llama":
        architecture = _MIXTRAL_8X7B
    if keys.get("expert_count") and not architecture.has_experts:
        raise UnsupportedArchitectureError(f"{name} with experts is not served from a GGUF file")
    config = _config(architecture, keys, shapes, factors)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    experts = config.get("num_experts") or config.get("num_local_experts", 0)
    places: dict[str, Place] = {}
    for tensor in shapes:
        found = _place(architecture, tensor, heads, experts)
        if found is None and _OLD_EXPERT.match(tensor):
            raise UnsupportedArchitectureError(
                f"the tensor {tensor!r} is one expert alone, as in files of before 2024-04: expected all "
                "experts of a layer in one tensor; take a newer file"
            )
        if found is None:
            raise UnsupportedArchitectureError(
                f"the tensor {tensor!r} is none of {architecture.model_class}: files with adapters, draft "
                "heads or quantised activations are not served"
            )
        if found.names:
            places[tensor] = found
    _check(shapes, config)
    if architecture.has_experts:
        _check_experts(shapes, config["num_hidden_layers"], experts, config["num_experts_per_tok"])
    return Model(config, places, _merged(shapes, config) if architecture.merges_experts else {})


def _config(
    architecture: _Architecture,
    keys: _Keys,
    shapes: Mapping[str, tuple[int, ...]],
    factors: Mapping[str, list[float]],
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
    for side, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        config[f"{side}_token_id"] = keys.metadata.get(f"tokenizer.ggml.{key}_token_id")
    _check_rotation(architecture, keys, config, factors)
    if not isinstance(config["rms_norm_eps"], float):
        raise CheckpointError(
            f"expected a number in {keys.name}.attention.layer_norm_rms_epsilon, found none"
        )
    if (scaling := _scaling(keys, length, factors)) is not None:
        config["rope_scaling"] = scaling
    config |= architecture.config(keys, config)
    if "intermediate_size" not in config:
        config["intermediate_size"] = keys.number("feed_forward_length")
    return config


def _check_rotation(
    architecture: _Architecture, keys: _Keys, config: Mapping[str, Any], factors: Mapping[str, list[float]]
) -> None:
    """Raise a CheckpointError unless the angles are those of a model that is served."""
    head_dim, theta = config["head_dim"], config["rope_theta"]
    turned = head_dim
    if keys.get("rope.dimension_count") is not None:
        turned = keys.number("rope.dimension_count")
    is_part = not turned % 2 and turned <= head_dim and int(head_dim * (turned / head_dim)) == turned
    if turned != head_dim and not (architecture.is_phi and is_part):
        raise UnsupportedArchitectureError(
            f"{turned} of {head_dim} dimensions are rotated, which is not served from a GGUF file of "
            f"{keys.name}"
        )
    if not isinstance(theta, int | float) or not theta > 0:
        raise CheckpointError(
            f"expected a positive number in {keys.name}.rope.freq_base, found {theta!r:.80}"
        )
    _check_factors(architecture, keys, factors, turned // 2)


def _check_factors(
    architecture: _Architecture, keys: _Keys, factors: Mapping[str, list[float]], count: int
) -> None:
    """Raise a CheckpointError unless the divisors are those of so many frequencies."""
    by_length = {SHORT_FACTORS, LONG_FACTORS} & factors.keys()
    expected = f"{SHORT_FACTORS} and {LONG_FACTORS}, or neither" if architecture.is_phi else "neither of them"
    if len(by_length) == 1 or (by_length and not architecture.is_phi):
        raise CheckpointError(f"found {' and '.join(sorted(by_length))}, expected {expected} in {keys.name}")
    if factors and keys.get("rope.scaling.type") not in (None, "none", "longrope"):
        raise UnsupportedArchitectureError(
            f"{' and '.join(sorted(factors))} beside {keys.name}.rope.scaling.type "
            f"{keys.get('rope.scaling.type')!r:.80}: expected one scaling of positions"
        )
    for name, divisors in factors.items():
        if len(divisors) != count or not all(0 < one < inf for one in divisors):
            raise CheckpointError(
                f"{name} has {len(divisors)} numbers, or some that are not positive: expected {count} "
                "divisors of frequencies; download the file again"
            )


def _scaling(keys: _Keys, length: int, factors: Mapping[str, list[float]]) -> dict[str, Any] | None:
    """The scaling of rotary frequencies; None for none."""
    if SHORT_FACTORS in factors and LONG_FACTORS in factors:
        return {
            "rope_type": "longrope",
            "short_factor": factors[SHORT_FACTORS],
            "long_factor": factors[LONG_FACTORS],
        }
    if ROPE_FACTORS in factors:  # the form of longrope, with the same factors at every length
        return {
            "rope_type": "longrope",
            "short_factor": factors[ROPE_FACTORS],
            "long_factor": factors[ROPE_FACTORS],
            "factor": 1.0,
            "attention_factor": 1.0,
            "original_max_position_embeddings": length,
        }
    kind, factor = keys.get("rope.scaling.type"), keys.get("rope.scaling.factor")
    if kind in (None, "none"):
        return None
    if kind not in _SCALINGS:
        raise UnsupportedArchitectureError(
            f"{keys.name}.rope.scaling.type is {kind!r:.80}: expected none, linear or yarn, or tensors with "
            "factors"
        )
    if not factor or factor == 1.0:
        return None
    found = {"rope_type": kind, "factor": float(factor)}
    if kind == "yarn":
        original = keys.get("rope.scaling.original_context_length")
        found["original_max_position_embeddings"] = original or int(length / factor)
    return found


def _place(architecture: _Architecture, tensor: str, heads: Mapping[str, int], experts: int) -> Place | None:
    """The place of a tensor; None if the model has none for it."""
    added = architecture.norm_offset if tensor.endswith("norm.weight") else 0.0
    if tensor in (ROPE_FACTORS, SHORT_FACTORS, LONG_FACTORS):
        return Place(())
    if tensor in _OUTSIDE:
        return Place((_OUTSIDE[tensor],), added=added)
    found = _LAYER.match(tensor)
    if found is None:
        return None
    layer, kind, end = found.groups()
    module = architecture.modules.get(kind) or _IN_LAYERS.get(kind)
    if module is None:
        return None
    if _OF_EXPERTS.match(kind):
        if not experts:
            return None
        if architecture.merges_experts:
            return Place(())
        return Place(tuple(f"model.layers.{layer}.{module.format(one)}.{end}" for one in range(experts)))
    name = f"model.layers.{layer}.{module}"
    if not module.endswith("sinks"):  # a parameter of the layer
        name = f"{name}.{end}"
    return Place((name,), heads.get(kind, 0) if architecture.is_permuted else 0, added)


def _merged(shapes: Iterable[str], config: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """`Model.merged` of gpt-oss.

    Raises:
        CheckpointError: a tensor is missing.
    """
    found: dict[str, tuple[str, ...]] = {}
    ends = {"weight": "", "bias": "_bias"}
    for layer, name, end in product(range(config["num_hidden_layers"]), _MERGED, ends):
        tensors = tuple(f"blk.{layer}.ffn_{part}_exps.{end}" for part in _MERGED[name])
        if missing := [one for one in tensors if one not in shapes]:
            raise CheckpointError(
                f"{', '.join(missing)} is missing: expected the experts of {config['model_type']}"
            )
        found[f"model.layers.{layer}.mlp.experts.{name}{ends[end]}"] = tensors
    return found


def _check_experts(shapes: Mapping[str, tuple[int, ...]], layers: int, experts: int, chosen: int) -> None:
    """Raise a CheckpointError unless the experts of all layers are there."""
    if chosen > experts:
        raise CheckpointError(f"expected at most {experts} experts for a token, found {chosen}")
    for layer, part in product(range(layers), ("gate", "up", "down")):
        name = f"blk.{layer}.ffn_{part}_exps.weight"
        found = shapes.get(name, ("none",))[0]
        if found != experts:
            raise CheckpointError(f"{name} has {found} experts, expected {experts}; download the file again")


def _check(shapes: Iterable[str], config: Mapping[str, Any]) -> None:
    """Every layer has the same tensors as the first one."""
    kinds = {name.partition("blk.0.")[2] for name in shapes if name.startswith("blk.0.")}
    for layer in range(config["num_hidden_layers"]):
        missing = sorted(kind for kind in kinds if f"blk.{layer}.{kind}" not in shapes)
        if missing or not kinds:
            raise CheckpointError(
                f"layer {layer} lacks {', '.join(missing) or 'all tensors'}: expected what the first one "
                "has; is a part of the model missing?"
            )
