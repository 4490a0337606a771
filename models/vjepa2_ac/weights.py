"""Reading of the published file: a pickle with the tensors of encoder and predictor.

Only tensors are read, and no code of the file is run (`weights_only`). The tensors are mapped into memory, so
that a node reads its own half alone.
"""

import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from models.checkpoints.files import CheckpointError
from models.vjepa2_ac.settings import weights_of

Tensors = dict[str, torch.Tensor]

_WRAPPERS: Final = ("module.", "backbone.")
"""Parts of names that training has left."""
_OF_TRANSFORMERS: Final = {
    "blocks.": "layer.",
    "patch_embed.": "embeddings.patch_embeddings.",
    "norm.": "layernorm.",
}
"""The beginnings of an encoder's names in transformers, by those in the file."""


def read_part(checkpoint: Path, part: str) -> Tensors:
    """Read the tensors of `encoder` or `predictor` of a checkpoint folder, without their wrappers' names.

    Raises:
        CheckpointError: the file is missing or damaged, or something else.
    """
    path = weights_of(checkpoint)
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except (OSError, RuntimeError, ValueError, EOFError, KeyError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path} cannot be read: {str(error)[:200]}; download it again") from error
    tensors = found.get(part) if isinstance(found, Mapping) else None
    if not isinstance(tensors, Mapping) or not tensors:
        raise CheckpointError(f"{path}: expected the parts encoder and predictor, found no {part}")
    return {_bare(name): tensor for name, tensor in tensors.items() if isinstance(tensor, torch.Tensor)}


def _bare(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def for_transformers(tensors: Tensors) -> Tensors:
    """Return an encoder's tensors under the names of transformers' `VJEPA2Encoder`.

    The file has query, key and value as one matrix. Position embeddings are dropped: positions are rotary.
    """
    found: Tensors = {}
    for name, tensor in tensors.items():
        if name == "pos_embed":
            continue
        start = next((start for start in _OF_TRANSFORMERS if name.startswith(start)), "")
        renamed = _OF_TRANSFORMERS.get(start, "") + name.removeprefix(start)
        renamed = renamed.replace(".attn.", ".attention.")
        if ".qkv." in renamed:
            thirds = tensor.chunk(3)
            names = (renamed.replace(".qkv.", f".{one}.") for one in ("query", "key", "value"))
            found |= dict(zip(names, thirds, strict=True))
        else:
            found[renamed] = tensor
    return found


def fill(module: torch.nn.Module, tensors: Tensors, path: Path, part: str) -> Any:
    """Put tensors into a module that was made on the meta device.

    Raises:
        CheckpointError: names or shapes differ.
    """
    try:
        module.load_state_dict(tensors, assign=True)
    except RuntimeError as error:
        raise CheckpointError(
            f"{path}: the {part} does not have the sizes in config.json (without one: those of ViT-g): "
            f"{str(error)[:400]}"
        ) from error
    return module.requires_grad_(False).eval()
