"""GGUF files of tiny checkpoints, as llama.cpp's converter writes them: names, order of rows, metadata."""

import json
import re
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
from safetensors.numpy import load_file

from models.checkpoints.weights import read_shards

_NAMES: Final = {
    "LlamaForCausalLM": "llama", "MistralForCausalLM": "llama", "MixtralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2", "Qwen2MoeForCausalLM": "qwen2moe", "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe", "GemmaForCausalLM": "gemma", "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3", "GptOssForCausalLM": "gpt-oss", "Olmo2ForCausalLM": "olmo2",
    "Phi3ForCausalLM": "phi3", "SmolLM3ForCausalLM": "smollm3", "GraniteForCausalLM": "granite",
    "OlmoeForCausalLM": "olmoe",
}  # fmt: skip
_IN_PAIRS: Final = ("llama", "smollm3", "granite")
"""Those whose rows of queries and keys are in pairs for another form of rotation."""
_EXPERT: Final = re.compile(r"^(model\.layers\.\d+\.\w+\.experts)\.(\d+)\.(\w+)\.weight$")
_GPT_OSS: Final = re.compile(r"^(model\.layers\.\d+\.mlp\.experts)\.(gate_up|down)_proj(_bias)?$")
_ROWS: Final = re.compile(r"\.(attn_[qk])\.(weight|bias)$")
Q8_0: Final = gguf.GGMLQuantizationType.Q8_0
_FEW_BITS: Final = frozenset(gguf.GGMLQuantizationType[name] for name in ("Q4_0", "Q5_1", "Q8_0"))


def write_gguf(
    checkpoint: Path,
    path: Path,
    kind: gguf.GGMLQuantizationType = Q8_0,
    *,
    change: dict[str, Any] | None = None,
    without: str = "",
    extra: dict[str, Any] | None = None,
    parts: int = 0,
) -> Path:
    """Write the model of a checkpoint folder; matrices are stored as `kind`.

    `change` replaces metadata (None removes a key), `without` leaves out the tensors whose names contain it,
    and `extra` adds tensors. With `parts`, at most so many tensors are in a file; the first one is returned.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    name = _NAMES[config["architectures"][0]]
    writer = gguf.GGUFWriter(path, name, split_max_tensors=parts)
    metadata = {**_metadata(name, config), **vocabulary_of(checkpoint), **(change or {})}
    for key, value in metadata.items():
        if value is not None:
            _add(writer, key, value)
    for tensor, data in (_tensors(checkpoint, config, name) | (extra or {})).items():
        if without and without in tensor:
            continue
        stored = kind if data.ndim > 1 and not tensor.endswith("bias") else gguf.GGMLQuantizationType.F32
        if name == "gpt-oss" and data.ndim > 2 and kind in _FEW_BITS:
            stored = gguf.GGMLQuantizationType.MXFP4
        writer.add_tensor(tensor, gguf.quantize(data, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if not parts else next(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))


def _add(writer: Any, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


def _metadata(name: str, config: dict[str, Any]) -> dict[str, Any]:
    found = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config["rope_theta"],
    }
    if "head_dim" in config:
        found["attention.key_length"] = found["attention.value_length"] = config["head_dim"]
    if config.get("sliding_window"):
        found["attention.sliding_window"] = config["sliding_window"]
    if name == "gemma3":
        found["attention.sliding_window_pattern"] = config["sliding_window_pattern"]
        found["rope.freq_base"] = float(config["rope_theta"])
    if name == "gemma2":
        for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
            found[cap] = config[cap]
    if name == "granite":
        found |= {
            "attention.scale": config["attention_multiplier"],
            "embedding_scale": config["embedding_multiplier"],
            "residual_scale": config["residual_multiplier"],
            "logit_scale": config["logits_scaling"],
        }
    if name == "phi3":
        found["rope.scaling.original_context_length"] = config["original_max_position_embeddings"]
    if name == "gpt-oss":
        scaling = config["rope_scaling"]
        found |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": scaling["factor"],
            "rope.scaling.original_context_length": scaling["original_max_position_embeddings"],
        }
    if experts := config.get("num_experts") or config.get("num_local_experts"):
        width = config.get("moe_intermediate_size") or config["intermediate_size"]
        found |= {
            "expert_count": experts,
            "expert_used_count": config["num_experts_per_tok"],
            "expert_feed_forward_length": width,
        }
    if shared := config.get("shared_expert_intermediate_size"):
        found["expert_shared_feed_forward_length"] = shared
    return {f"{name}.{key}": value for key, value in found.items()}


def vocabulary_of(checkpoint: Path) -> dict[str, Any]:
    """The metadata of a checkpoint's tokenizer."""
    told = json.loads((checkpoint / "tokenizer.json").read_text())
    settings = json.loads((checkpoint / "tokenizer_config.json").read_text())
    special = {one["content"]: one["id"] for one in told["added_tokens"]}
    ids = told["model"]["vocab"] | special
    tokens = sorted(ids, key=ids.__getitem__)
    merges = [one if isinstance(one, str) else " ".join(one) for one in told["model"]["merges"]]
    found: dict[str, Any] = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
        "tokenizer.ggml.eos_token_id": special[settings["eos_token"]],
        "tokenizer.chat_template": settings["chat_template"],
    }
    if told["model"].get("byte_fallback"):  # sentence pieces: the score of a token is its place among merges
        rank = {merge.replace(" ", ""): -float(place) for place, merge in reversed([*enumerate(merges)])}
        types = [6 if re.fullmatch("<0x..>", one) else 3 if one in special else 1 for one in tokens]
        types[ids["<unk>"]] = 2
        found |= {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.scores": [rank.get(token, -1e9) for token in tokens],
            "tokenizer.ggml.token_type": types,
            "tokenizer.ggml.unknown_token_id": ids["<unk>"],
        }
    else:
        found |= {
            "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2", "tokenizer.ggml.merges": merges,
        }  # fmt: skip
    if settings["bos_token"] is not None:
        found |= {
            "tokenizer.ggml.bos_token_id": special[settings["bos_token"]],
            "tokenizer.ggml.add_bos_token": True,
        }
    return found


def _tensors(checkpoint: Path, config: dict[str, Any], name: str) -> dict[str, Any]:
    stored: dict[str, Any] = {}
    for shard in read_shards(checkpoint):
        stored |= load_file(shard.path)
    found: dict[str, Any] = {}
    experts: dict[str, dict[int, Any]] = {}
    names = _Names(name, config["num_hidden_layers"])
    for key, weight in stored.items():
        data = weight.astype(np.float32)
        if name.startswith("gemma") and key.endswith("norm.weight"):
            data = data + 1
        if (one := _EXPERT.match(key)) is not None:
            experts.setdefault(names.of(f"{one[1]}.{one[3]}.weight"), {})[int(one[2])] = data
        elif (one := _GPT_OSS.match(key)) is not None:
            found |= _apart(names, one[1], one[2], data, has_biases=bool(one[3]))
        else:
            written = names.of(key)
            rows = _ROWS.search(written)
            if name in _IN_PAIRS and rows is not None:
                heads = "num_attention_heads" if rows[1] == "attn_q" else "num_key_value_heads"
                data = _permuted(data, config[heads])
            found[written] = data[0] if written.endswith("ffn_gate_inp_shexp.weight") else data
    found |= {key: np.stack([parts[n] for n in range(len(parts))]) for key, parts in experts.items()}
    if scaling := config.get("rope_scaling"):
        factors = {"long_factor": "rope_factors_long.weight", "short_factor": "rope_factors_short.weight"}
        found |= {
            tensor: np.array(scaling[key], np.float32) for key, tensor in factors.items() if key in scaling
        }
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type") == "llama3":
        found["rope_freqs.weight"] = _llama3_factors(config, scaling)
    return found


class _Names:
    """The names of tensors in files, by llama.cpp's own list."""

    def __init__(self, name: str, layers: int) -> None:
        kinds = {written: kind for kind, written in gguf.MODEL_ARCH_NAMES.items()}
        self._map = gguf.get_tensor_name_map(kinds[name], layers)

    def of(self, key: str) -> str:
        """The name of a tensor of a checkpoint."""
        is_whole = key.endswith((".weight", ".bias"))  # others are parameters of a layer
        found = self._map.get_name(key if is_whole else f"{key}.weight", try_suffixes=(".weight", ".bias"))
        assert found is not None, key
        return str(found)


def _apart(names: _Names, module: str, kind: str, data: Any, *, has_biases: bool) -> dict[str, Any]:
    """The experts of gpt-oss, whose gate and up alternate."""
    outputs = data if has_biases else data.swapaxes(1, 2)
    parts = {"gate_proj": outputs[:, 0::2], "up_proj": outputs[:, 1::2]}
    if kind == "down":
        parts = {"down_proj": outputs}
    end = "bias" if has_biases else "weight"
    return {names.of(f"{module}.{part}.{end}"): np.ascontiguousarray(rows) for part, rows in parts.items()}


def _permuted(weight: Any, heads: int) -> Any:
    """The even and odd rows of llama.cpp's rotation, beside each other."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def _llama3_factors(config: dict[str, Any], scaling: dict[str, Any]) -> Any:
    """The divisor of each frequency, as Llama 3.1's scaling defines it."""
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    original, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    found = []
    for place in range(0, size, 2):
        length = 2 * np.pi * config["rope_theta"] ** (place / size)
        if length < original / high:
            found.append(1.0)
        elif length > original / low:
            found.append(factor)
        else:
            smooth = (original / length - low) / (high - low)
            found.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(found, dtype=np.float32)
