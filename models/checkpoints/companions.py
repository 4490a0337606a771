"""Folders of a second checkpoint that a model needs, such as an audio codec."""

from pathlib import Path

from huggingface_hub.constants import HF_HUB_CACHE

from models.checkpoints.files import CheckpointError
from models.checkpoints.hub_cache import snapshot


def find_companion(checkpoint: Path, folder: str | None, name: str, repository: str) -> Path:
    """The folder of a second checkpoint.

    Args:
        checkpoint: the folder of the model. Without `folder`, the other one is searched in its subfolder
            `name`, then in the cache of the Hugging Face hub that contains it, then in the default cache.
        folder: the path in `model_kwargs`, under the key `name`.
        name: of the companion.
        repository: of its published checkpoint.

    Raises:
        CheckpointError: it was not found.
    """
    if folder is not None:
        return Path(folder).expanduser()
    inside = checkpoint / name
    if inside.is_dir():
        return inside
    caches = [*checkpoint.absolute().parents[2:3], Path(HF_HUB_CACHE)]
    for cache in caches:
        if found := snapshot(cache, repository):
            return found
    raise CheckpointError(
        f"{name.upper()} is missing: expected it in {inside}, or {repository} in {caches[-1]}; download it "
        f"there, or set its path in model_kwargs.{name}"
    )
