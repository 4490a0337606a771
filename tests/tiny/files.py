"""How a checkpoint's files are written: safetensors by hand, whole or in shards with an index."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.tiny.model import Array


def write_weights(folder: Path, tensors: Mapping[str, Array], dtype: str, shards: int) -> None:
    def stored(name: str) -> bytes:
        array = tensors[name]
        # bfloat16 is the upper half of a float32.
        return (
            (array.view(np.uint32) >> 16).astype(np.uint16).tobytes() if dtype == "BF16" else array.tobytes()
        )

    def write(path: Path, names: list[str]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        data = b""
        for name in names:
            start, data = len(data), data + stored(name)
            shape = list(tensors[name].shape)
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, len(data)]}
        head = json.dumps(header).encode()
        head += b" " * (-len(head) % 8)
        path.write_bytes(struct.pack("<Q", len(head)) + head + data)

    names = sorted(tensors)
    if shards == 1:
        write(folder / "model.safetensors", names)
        return
    weight_map: dict[str, str] = {}
    for index in range(shards):
        file = f"model-{index + 1:05d}-of-{shards:05d}.safetensors"
        mine = names[index::shards]
        write(folder / file, mine)
        weight_map |= dict.fromkeys(mine, file)
    size = sum(len(stored(name)) for name in names)
    index_file = folder / "model.safetensors.index.json"
    write_json(index_file, {"metadata": {"total_size": size}, "weight_map": weight_map})


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n")
