"""Conversion of a Qwen3, gpt-oss or Gemma 3 checkpoint for llama.cpp: GGUF.

Weights are copied bit by bit, as bfloat16 or MXFP4. Norms and biases become float32, as in llama.cpp's own
converter. For fewer bits llama.cpp then quantises the file.
"""

import ctypes
import json
import re
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType, RopeScalingType, TokenType

from benchmarks.peers.forms import kind_of, path_of
from benchmarks.peers.protocol import asked_weights

_EXPERTS = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.\d+\.(gate|up|down)_proj\.weight")
_MXFP4 = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up|down)_proj(_blocks|_scales|_bias)")
_ROWS = {
    "gate_up": {"gate": slice(0, None, 2), "up": slice(1, None, 2)},
    "down": {"down": slice(None)},
}
"""The rows of the matrices that gpt-oss stores as one."""
_NAMES = {
    "input_layernorm": "attn_norm",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.gate_proj": "ffn_gate",
    "mlp.router": "ffn_gate_inp",
    "mlp.up_proj": "ffn_up",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.k_proj": "attn_k",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.v_proj": "attn_v",
}
_OTHER_NAMES = {
    "gpt_oss": {"post_attention_layernorm": "post_attention_norm", "self_attn.sinks": "attn_sinks"},
    "gemma3_text": {
        "post_attention_layernorm": "post_attention_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
        "pre_feedforward_layernorm": "ffn_norm",
    },
}
"""By the type of the model."""
_ARCHITECTURES = {
    "gemma3_text": "gemma3", "gpt_oss": "gpt-oss", "qwen3": "qwen3", "qwen3_moe": "qwen3moe",
}  # fmt: skip
_ROUTERS = (".mlp.gate.weight", ".mlp.router.weight")
_EMBEDDINGS = "model.embed_tokens.weight"
_ENDS = {_EMBEDDINGS: "token_embd.weight", "model.norm.weight": "output_norm.weight"}


def convert(checkpoint: Path) -> None:
    """Write the file atomically, unless it is newer. The output layer is the embeddings."""
    path = path_of(checkpoint)
    newest = max(one.stat().st_mtime for one in (checkpoint / "config.json", Path(__file__)))
    if path.exists() and path.stat().st_mtime > newest:
        return
    config = json.loads((checkpoint / "config.json").read_text())
    draft = path.with_name(f"{path.name}.part")
    experts = config.get("num_experts") or config.get("num_local_experts", 0)
    is_gpt_oss = config["model_type"] == "gpt_oss"
    is_gemma = config["model_type"] == "gemma3_text"
    writer = GGUFWriter(draft, _ARCHITECTURES[config["model_type"]])
    writer.add_name(checkpoint.name)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(
            config.get("moe_intermediate_size", config["intermediate_size"])
        )
    if scaling := config["rope_scaling"]:
        writer.add_rope_scaling_type(RopeScalingType(scaling["rope_type"]))
        writer.add_rope_scaling_factor(scaling["factor"])
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
    if config["sliding_window"]:
        writer.add_sliding_window(config["sliding_window"])
    _add_tokenizer(writer, checkpoint)
    writer.add_file_type(LlamaFileType.MOSTLY_BF16)
    names = _NAMES | _OTHER_NAMES.get(config["model_type"], {})
    merged: dict[str, list[Any]] = {}
    mxfp4: dict[tuple[str, str], dict[str, Any]] = {}
    for name, values in _tensors(checkpoint / "model.safetensors"):
        if found := _EXPERTS.fullmatch(name):
            merged.setdefault(f"blk.{found[1]}.ffn_{found[2]}_exps.weight", []).append(values)
        elif found := _MXFP4.fullmatch(name):
            mxfp4.setdefault((found[1], found[2]), {})[found[3]] = values
        elif values.ndim == 1 or name.endswith(_ROUTERS):  # routers are float32, as norms are
            added = 1.0 if is_gemma else 0.0  # as llama.cpp stores the weights of norms
            writer.add_tensor(_renamed(name, names), _floats(values) + np.float32(added))
        else:
            _add_bfloat16(writer, _renamed(name, names), values)
        if is_gpt_oss and name == _EMBEDDINGS:  # llama.cpp expects a head of its own
            _add_bfloat16(writer, "output.weight", values)
    for name, several in merged.items():
        _add_bfloat16(writer, name, np.stack(several))
    for (layer, kind), parts in mxfp4.items():
        for part, rows in _ROWS[kind].items():
            at = f"blk.{layer}.ffn_{part}_exps"
            blocks = _mxfp4_blocks(parts["_blocks"][:, rows], parts["_scales"][:, rows])
            writer.add_tensor(f"{at}.weight", blocks, raw_dtype=GGMLQuantizationType.MXFP4)
            writer.add_tensor(f"{at}.bias", _floats(parts["_bias"][:, rows]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    draft.rename(path)


def _floats(values: Any) -> Any:
    """bfloat16 as float32."""
    return (values.astype(np.uint32) << 16).view(np.float32)


def _mxfp4_blocks(blocks: Any, scales: Any) -> Any:
    """llama.cpp's blocks, (experts, outputs, 17 * groups): the scale, then the first half in the low bits."""
    numbers = np.stack([blocks & 15, blocks >> 4], -1).reshape(*blocks.shape[:-1], 32)
    packed = numbers[..., :16] | numbers[..., 16:] << 4
    return np.concatenate([scales[..., None], packed], -1).reshape(*scales.shape[:2], -1)


def _add_bfloat16(writer: GGUFWriter, name: str, values: Any) -> None:
    raw = np.ascontiguousarray(values).view(np.uint8)
    writer.add_tensor(name, raw, raw_dtype=GGMLQuantizationType.BF16)


def _add_tokenizer(writer: GGUFWriter, checkpoint: Path) -> None:
    """Add the vocabulary of bytes, as llama.cpp's converter does."""
    told = json.loads((checkpoint / "tokenizer.json").read_text())
    settings = json.loads((checkpoint / "tokenizer_config.json").read_text())
    special = {one["content"]: one["id"] for one in told["added_tokens"]}
    ids = told["model"]["vocab"] | special
    tokens = sorted(ids, key=ids.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL if token in special else TokenType.NORMAL for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in told["model"]["merges"]])
    writer.add_eos_token_id(special[settings["eos_token"]])
    writer.add_chat_template(settings["chat_template"])


def quantise(checkpoint: Path, weights: str) -> None:
    """Let llama.cpp write the file with weights of this form, unless it is newer."""
    import llama_cpp  # noqa: PLC0415 - not needed, and slow to import, for 16 bits

    source, path = path_of(checkpoint), path_of(checkpoint, weights)
    if path.exists() and path.stat().st_mtime > source.stat().st_mtime:
        return
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = int(LlamaFileType[f"MOSTLY_{kind_of(weights).upper()}"])
    draft = path.with_name(f"{path.name}.part")
    if status := llama_cpp.llama_model_quantize(
        str(source).encode(), str(draft).encode(), ctypes.byref(params)
    ):
        raise RuntimeError(f"llama.cpp could not quantise {source}: {status}; its output is on stderr")
    draft.rename(path)


def _renamed(name: str, names: dict[str, str]) -> str:
    if name in _ENDS:
        return _ENDS[name]
    end = "bias" if name.endswith(".bias") else "weight"
    _, _, layer, inner = name.removesuffix(f".{end}").split(".", 3)
    return f"blk.{layer}.{names[inner]}.{end}"


def _tensors(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield names and memory-mapped values: bytes, or bfloat16 as 16-bit integers."""
    with path.open("rb") as file:
        length = struct.unpack("<Q", file.read(8))[0]
        header = json.loads(file.read(length))
    for name, entry in header.items():
        if name != "__metadata__":
            start = 8 + length + entry["data_offsets"][0]
            dtype = np.uint8 if entry["dtype"] == "U8" else np.uint16
            yield name, np.memmap(path, dtype, "r", start, tuple(entry["shape"]))


if __name__ == "__main__":
    convert(Path(sys.argv[1]))
    if asked_weights() != "16":
        quantise(Path(sys.argv[1]), asked_weights())
