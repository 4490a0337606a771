"""The weights that the nodes of BAGEL load: of language model and vision tower, or of the autoencoder.

The nodes that show unfinished images measure the colours of the autoencoder, where the folder has it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.bagel.folder import AE, EMA
from models.checkpoints.contents import Files


def weight_files(checkpoint: Path, node: str, kwargs: Mapping[str, Any]) -> Files:
    """The files that `nodes.load` reads for a node, besides those of processing."""
    shown = (AE,) if (checkpoint / AE).exists() else ()
    of_nodes = {
        "LLM": (*shown, EMA), "combine_cfg": shown, "vae_encoder": (AE, EMA), "vae_decoder": (AE,),
    }  # fmt: skip
    return {name: checkpoint / name for name in of_nodes.get(node, (EMA,))}
