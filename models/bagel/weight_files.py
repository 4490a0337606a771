"""The weights that the nodes of BAGEL load: of language model and vision tower, or of the autoencoder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.bagel.folder import AE, EMA
from models.checkpoints.contents import Files


def weight_files(checkpoint: Path, node: str, kwargs: Mapping[str, Any]) -> Files:
    """The files that `nodes.load` reads for a node, besides those of processing."""
    names = {"vae_encoder": (AE, EMA), "vae_decoder": (AE,), "combine_cfg": ()}.get(node, (EMA,))
    return {name: checkpoint / name for name in names}
