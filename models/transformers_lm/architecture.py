"""Properties of a checkpoint by its `config.json`: model class, config, longest sequence, dtype.

Only the modelling file of the named class is imported: no Auto classes, no hub, no remote code.
"""

import re
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import torch
from transformers.models.auto.configuration_auto import model_type_to_module_name

from models.checkpoints.files import CheckpointError, UnsupportedArchitectureError, context_length
from models.checkpoints.weights import Shard

CPU_FLOAT32_BYTES: Final = 8 * 2**30
"""On a CPU, `auto` means float32 if the weights take at most this many bytes in it."""
CPU_BFLOAT16_BYTES: Final = 2**28
"""From this size on `auto` means bfloat16, for weights stored in it and a processor with instructions for it.

A step of such a model takes as long as reading its weights, which is half as many bytes in bfloat16. Smaller
models are fast in any case, and more exact in float32."""

_NO_LIMIT: Final = 2**20
_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SAFETENSORS_DTYPES: Final = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_IGNORED_KEYS: Final = frozenset(
    {
        # The engine decides how to compute, not the checkpoint; some of these name code to download.
        "_attn_implementation",
        "attn_implementation",
        "_attn_implementation_internal",
        "_experts_implementation",
        "experts_implementation",
        "fusion_config",
        "auto_map",
        "torch_dtype",
        "dtype",
        # Quantised weights are loaded as floats (`quantised.py`).
        "quantization_config",
        # Further outputs, which are not used.
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
    }
)


def model_class_of(
    raw: Mapping[str, Any],
    checkpoint: Path,
    kind: str = "(ForCausalLM|LMHeadModel)",
    what: str = "decoder-only language model",
) -> Any:
    """The model class that `config.json` names, imported from its modelling file.

    `kind` is the end of its name, a regular expression; `what` says in errors what is expected.

    Raises:
        CheckpointError: it names none.
        UnsupportedArchitectureError: transformers itself has no such class.
    """
    names, model_type = raw.get("architectures"), raw.get("model_type")
    name = names[0] if isinstance(names, list) and names else None
    if not isinstance(name, str) or not isinstance(model_type, str):
        raise CheckpointError(
            f"{checkpoint / 'config.json'}: expected architectures and model_type, "
            f"found {names!r} and {model_type!r}"
        )
    module_name = model_type_to_module_name(model_type)  # gemma3_text is in gemma3
    is_plain = re.fullmatch(r"[a-z0-9_]+", module_name) and re.fullmatch(rf"\w+{kind}", name)
    refused = UnsupportedArchitectureError(
        f"{name} (model_type {model_type!r}) is not served: expected a {what} that "
        "transformers knows by itself (remote code is never run)"
    )
    if not is_plain:
        raise refused
    try:
        module = import_module(f"transformers.models.{module_name}.modeling_{module_name}")
    except ModuleNotFoundError as error:
        raise refused from error
    model_class = getattr(module, name, None)
    if model_class is None:
        raise refused
    return model_class


def body_name_of(model: Any) -> str:
    """The attribute of a model with a head that holds its layers."""
    name: str = model.base_model_prefix
    return name if hasattr(model, name) else "model"  # Llama 4's prefix is that of its image-text model


def body_of(model: Any) -> Any:
    """The layers of a model, without its head."""
    body = model.base_model
    return body if body is not model else getattr(model, body_name_of(model))


def config_of(model_class: Any, raw: Mapping[str, Any], checkpoint: Path) -> Any:
    """The config object of the class, from `config.json`.

    Raises:
        CheckpointError: the values are invalid for this class.
    """
    try:
        config = model_class.config_class.from_dict(_known(raw))
    except Exception as error:
        raise CheckpointError(
            f"{checkpoint / 'config.json'} makes no {model_class.__name__}: {' '.join(str(error).split())}; "
            "use the file that was published with the weights"
        ) from error
    ropes = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    for rope in (ropes, *ropes.values()):
        # Dynamic angles equal the default ones up to `max_position_embeddings`, the longest sequence here.
        # With `dynamic`, transformers would synchronize with the device in every forward.
        if isinstance(rope, dict) and rope.get("rope_type") == "dynamic":
            rope["rope_type"] = "default"
    return config


def _known(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a config that a model class is built from, also in the configs of its parts."""
    return {
        key: _known(value) if key.endswith("_config") and isinstance(value, dict) else _decoded(value)
        for key, value in raw.items()
        if key not in _IGNORED_KEYS
    }


def _decoded(value: Any) -> Any:
    """A value of `config.json`, with the numbers that JSON lacks: `{"__float__": "Infinity"}`."""
    if isinstance(value, dict):
        tag = value.get("__float__")
        if len(value) == 1 and tag in ("Infinity", "-Infinity", "NaN"):
            return float(tag)
        return {key: _decoded(inside) for key, inside in value.items()}
    return [_decoded(inside) for inside in value] if isinstance(value, list) else value


def max_positions_of(config: Any, raw: Mapping[str, Any]) -> int:
    """The longest sequence that is served; a very large number for a model without position embeddings."""
    default = getattr(config, "max_position_embeddings", None)
    return context_length({"max_position_embeddings": default, **raw}) or _NO_LIMIT


def has_bfloat16_instructions() -> bool:
    """True if the processor has bfloat16 instructions (AVX-512 BF16 or AMX)."""
    checks = (getattr(torch.cpu, f"_is_{what}_supported", None) for what in ("avx512_bf16", "amx_tile"))
    return any(is_there() for is_there in checks if is_there is not None)


def choose_dtype(name: str, device: torch.device, shards: list[Shard]) -> torch.dtype:
    """The dtype to compute in: the one of that name, or for `auto` one that suits device and weights.

    Raises:
        CheckpointError: the name is unknown, or the weights are not stored as floats.
    """
    if name != "auto":
        if name not in _DTYPES:
            raise CheckpointError(f"dtype must be auto or one of {sorted(_DTYPES)}, found {name!r}")
        return _DTYPES[name]
    tensors = [tensor for shard in shards for tensor in shard.tensors.values()]
    if device.type == "cpu":
        narrow = sum(tensor.nbytes for tensor in tensors if tensor.dtype == "BF16")
        if narrow >= CPU_BFLOAT16_BYTES and has_bfloat16_instructions():
            return torch.bfloat16
        is_small = sum(4 * tensor.elements for tensor in tensors) <= CPU_FLOAT32_BYTES
        return torch.float32 if is_small else torch.bfloat16
    largest = max(tensors, key=lambda tensor: tensor.elements)
    if largest.dtype not in _SAFETENSORS_DTYPES:
        raise CheckpointError(
            f"the weights are stored as {largest.dtype}: expected one of {sorted(_SAFETENSORS_DTYPES)}, or a "
            "quantization_config that describes them"
        )
    return _SAFETENSORS_DTYPES[largest.dtype]
