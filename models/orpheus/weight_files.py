"""The weights that the nodes of Orpheus load: the language model's, or SNAC's own folder. No torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from huggingface_hub.constants import HF_HUB_CACHE

from models.checkpoints.contents import Files, safetensors, within
from models.checkpoints.files import CheckpointError
from models.checkpoints.hub_cache import snapshot
from models.checkpoints.weights import SINGLE

SNAC: Final = "snac_decoder"
"""The node that decodes audio."""
REPOSITORY: Final = "hubertsiuzdak/snac_24khz"
"""The repository of the published checkpoint of SNAC."""
PICKLE: Final = "pytorch_model.bin"
"""Its weights, as published. `model.safetensors` is preferred where it exists."""


def weight_files(checkpoint: Path, node: str, kwargs: Mapping[str, Any]) -> Files:
    """The files that `nodes.load` reads for a node, besides those of processing.

    Raises:
        CheckpointError: SNAC was not found.
    """
    if node != SNAC:
        return safetensors(checkpoint)
    folder = find_snac(checkpoint, kwargs.get("snac"))
    weights = SINGLE if (folder / SINGLE).is_file() else PICKLE
    return within("snac", {name: folder / name for name in ("config.json", weights)})


def further_repositories(checkpoint: Path) -> Mapping[str, Sequence[str]]:
    """SNAC, unless the checkpoint's folder has it."""
    return {} if (checkpoint / "snac").is_dir() else {REPOSITORY: ("config.json", SINGLE, PICKLE)}


def find_snac(checkpoint: Path, folder: str | None) -> Path:
    """The folder of the SNAC checkpoint.

    Args:
        checkpoint: the folder of the language model. Without `folder`, SNAC is searched in its subfolder
            `snac`, then in the cache of the Hugging Face hub that contains it, then in the default cache.
        folder: the path in `model_kwargs.snac`.

    Raises:
        CheckpointError: it was not found.
    """
    if folder is not None:
        return Path(folder).expanduser()
    inside = checkpoint / "snac"
    if inside.is_dir():
        return inside
    caches = [*checkpoint.absolute().parents[2:3], Path(HF_HUB_CACHE)]
    for cache in caches:
        if found := snapshot(cache, REPOSITORY):
            return found
    raise CheckpointError(
        f"SNAC is missing: expected it in {inside}, or {REPOSITORY} in {caches[-1]}; download it there, or "
        "set its path in model_kwargs.snac"
    )
