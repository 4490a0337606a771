"""A checkpoint in the shape and layout of Orpheus 3B with random weights, for machines without the real one.

6.6 GB in bfloat16, four shards, and SNAC at its published size. The tokenizer is that of the tiny checkpoint.
Its output is noise; its cost is that of the real model.
"""

import json
import shutil
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import save_file

from tests.tiny.orpheus import END_AUDIO, FIRST_AUDIO, VOCAB_SIZE, tiny_orpheus, write_snac

_SHAPE: Final = {
    "head_dim": 128,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_attention_heads": 24,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
}
_SNAC: Final = {"encoder_dim": 48, "decoder_dim": 1024, "codebook_dim": 8}
"""Sizes of the published vocoder that the tiny one reduces; rates, strides and codebooks are the same."""
_SHARDS: Final = 4
_STD: Final = 0.02
_SILENT: Final = 0.05
_LOUD: Final = 8.0
"""How long the rows of tokens are: of those that are never said, and of audio tokens."""


def write_orpheus_3b(folder: Path, **changes: int) -> Path:
    """Write the checkpoint into an empty folder; `changes` replace sizes of the shape."""
    shape = _SHAPE | changes
    for path in tiny_orpheus().iterdir():
        if path.is_file() and "safetensors" not in path.name:
            shutil.copy(path, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | shape, indent=1))
    _write_llm(folder, shape)
    (folder / "snac").mkdir()
    write_snac(folder / "snac", **_SNAC)
    return folder


def _write_llm(folder: Path, shape: dict[str, int]) -> None:
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    queries, keys = (shape["head_dim"] * shape[f"num_{kind}_heads"] for kind in ("attention", "key_value"))
    wanted: list[tuple[str, tuple[int, ...]]] = [
        ("model.embed_tokens.weight", (VOCAB_SIZE, hidden)),
        ("model.norm.weight", (hidden,)),
    ]
    for layer in range(shape["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        wanted += [
            (f"{at}.input_layernorm.weight", (hidden,)),
            (f"{at}.post_attention_layernorm.weight", (hidden,)),
            (f"{at}.self_attn.q_proj.weight", (queries, hidden)),
            (f"{at}.self_attn.k_proj.weight", (keys, hidden)),
            (f"{at}.self_attn.v_proj.weight", (keys, hidden)),
            (f"{at}.self_attn.o_proj.weight", (hidden, queries)),
            (f"{at}.mlp.gate_proj.weight", (inner, hidden)),
            (f"{at}.mlp.up_proj.weight", (inner, hidden)),
            (f"{at}.mlp.down_proj.weight", (hidden, inner)),
        ]
    draw = torch.Generator().manual_seed(0)
    weight_map: dict[str, str] = {}
    for number in range(_SHARDS):
        name = f"model-{number + 1:05}-of-{_SHARDS:05}.safetensors"
        part = wanted[number::_SHARDS]
        tensors = {}
        for key, size in part:
            ones = len(size) == 1
            made = torch.ones(size) if ones else torch.randn(size, generator=draw) * _STD
            if key == "model.embed_tokens.weight":  # also the output layer: only audio tokens are emitted
                made[:FIRST_AUDIO] *= _SILENT
                made[END_AUDIO:] *= _SILENT
                made[FIRST_AUDIO:END_AUDIO] *= _LOUD
            tensors[key] = made.to(torch.bfloat16)
        save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
