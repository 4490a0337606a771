"""The weights that the nodes of a pipeline load: those of its components."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.checkpoints.contents import Files, safetensors, within
from models.diffusion_pipelines.components import DENOISERS, Component, read_index


def weight_files(checkpoint: Path, node: str, kwargs: Mapping[str, Any]) -> Files:
    """The files that `nodes.load` reads for a node, besides those of processing.

    Raises:
        CheckpointError: `model_index.json` is missing or damaged.
    """
    parts = read_index(checkpoint).components.values()
    found: dict[str, Path] = {}
    for part in parts:
        if _is_of(part, node):
            found |= within(part.name, safetensors(checkpoint / part.name))
            found |= within(part.name, _diffusers_weights(checkpoint / part.name))
    return found


def _is_of(part: Component, node: str) -> bool:
    match node:
        case "text_encoder":
            return part.is_text
        case "denoiser" | "dit":  # the VAE, too: an input image is encoded there
            return part.name in (*DENOISERS, "vae", "image_encoder")
        case "vae_decoder":
            return part.name in ("vae", "sound_tokenizer")
        case _:
            return True


def _diffusers_weights(folder: Path) -> Files:
    """The weights of a part in diffusers' own naming."""
    return {path.name: path for path in sorted(folder.glob("diffusion_pytorch_model*.safetensors*"))}
