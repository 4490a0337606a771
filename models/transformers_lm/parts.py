"""Loading of one part of a model class of transformers, such as the encoder of an encoder and a predictor.

The tensors of the other parts are never read.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from models.checkpoints.files import read_json
from models.checkpoints.progress import Progress
from models.checkpoints.weights import read_shards
from models.transformers_lm.architecture import choose_dtype, config_of
from models.transformers_lm.tensors import load_weights


def load_part(
    model_class: Any,
    part: str,
    checkpoint: Path,
    *,
    device: str | torch.device,
    dtype: str,
    progress: Progress,
) -> Any:
    """Load one part of a checkpoint folder in Hugging Face format.

    `model_class` has the child `part`, whose tensors' names begin with its name.

    Raises:
        CheckpointError: a file of the folder is missing, damaged or unsupported.
    """
    shards = [
        replace(shard, tensors={k: v for k, v in shard.tensors.items() if k.startswith(f"{part}.")})
        for shard in read_shards(checkpoint)
    ]
    config = config_of(model_class, read_json(checkpoint / "config.json"), checkpoint)
    on = torch.device(device)
    chosen = choose_dtype(dtype, on, shards)
    model = load_weights(_with_only(model_class, part), config, shards, on, chosen, progress)
    return getattr(model, part)


def _with_only(model_class: Any, part: str) -> Any:
    """The class without its other parts, under its own name: transformers selects its rules by it."""

    def begin(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        model_class.__init__(self, config, *args, **kwargs)
        for name, _ in [*self.named_children()]:
            if name != part:
                delattr(self, name)

    names = {"__module__": model_class.__module__, "__qualname__": model_class.__qualname__}
    return type(model_class.__name__, (model_class,), names | {"__init__": begin})
