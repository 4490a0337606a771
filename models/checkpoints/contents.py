"""The files of a checkpoint folder that decide what a model answers, by their relative path. No torch.

processing_files   tokenizer, chat template, generation config, config.json: read by every worker
safetensors        the weights that a loader of this package reads
all_weights        everything that looks like weights: for loaders that do not say what they read
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from models.checkpoints.files import CheckpointError, read_json
from models.checkpoints.weights import INDEX, SINGLE

PROCESSING: Final = (
    "*.json",
    "*.jinja",
    "*.model",
    "*.tiktoken",
    "merges.txt",
    "vocab.txt",
    "additional_chat_templates/*.jinja",
)
WEIGHTS: Final = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.npz", "*.onnx")
_INDEX: Final = ".index.json"
"""The end of the names of files that say which weights are in which file."""

Files = Mapping[str, Path]
"""Files by the name that they have on every machine: the path relative to their folder."""


def processing_files(folder: Path) -> Files:
    """The small files of a folder, all of which may matter: a loader reads any of them."""
    found = (path for pattern in PROCESSING for path in folder.glob(pattern))
    return {str(path.relative_to(folder)): path for path in found if not path.name.endswith(_INDEX)}


def safetensors(folder: Path) -> Files:
    """The weights that `models.checkpoints.weights.read_shards` reads; empty if they cannot be found."""
    if (folder / SINGLE).is_file():
        return {SINGLE: folder / SINGLE}
    try:
        shards = read_json(folder / INDEX).get("weight_map")
    except CheckpointError:
        return {}  # the loader says what is wrong
    names = set(shards.values()) if isinstance(shards, dict) else set[str]()
    return {name: folder / name for name in (INDEX, *sorted(map(str, names)))}


def all_weights(folder: Path) -> Files:
    """All files of a folder that look like weights."""
    found = (path for pattern in (*WEIGHTS, f"*{_INDEX}") for path in folder.glob(pattern))
    return {str(path.relative_to(folder)): path for path in found}


def within(name: str, files: Files) -> Files:
    """The files of a further folder, under the name of its role."""
    return {f"{name}/{path}": file for path, file in files.items()}
