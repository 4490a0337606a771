"""The tiny Llama with each of its two KV heads twice: the same function, which four ranks can share."""

import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from models.checkpoints.files import read_json
from tests.tiny import tiny_checkpoint
from tests.tiny.files import write_json


def write_four_heads(folder: Path) -> Path:
    """Write the checkpoint into a folder, which may exist."""
    shutil.copytree(tiny_checkpoint("llama"), folder, dirs_exist_ok=True)
    config = read_json(folder / "config.json")
    heads, size = config["num_key_value_heads"], config["hidden_size"] // config["num_attention_heads"]
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            tensors[name] = np.repeat(tensor.reshape(heads, size, -1), 2, axis=0).reshape(-1, tensor.shape[1])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", config | {"num_key_value_heads": 2 * heads})
    return folder
