"""dllm-hub's checkpoints (`a2d-qwen3` and the like) as those of transformers, with another mask."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.diffusion_text.a2d_classes import CLASSES
from models.transformers_lm.architecture import config_of, model_class_of
from models.transformers_lm.renames import Published


def published(raw: Mapping[str, Any], checkpoint: Path) -> Published | None:
    """Return the class that computes a checkpoint; None if its `model_type` is not dllm-hub's.

    Raises:
        CheckpointError: the values in its `config.json` are invalid.
    """
    found = CLASSES.get(str(raw.get("model_type")))
    if found is None:
        return None
    model_type, name = found
    plain = {**raw, "model_type": model_type, "architectures": [name]}
    model_class = model_class_of(plain, checkpoint)
    config = config_of(model_class, plain, checkpoint)
    return Published(model_class=model_class, config=config, rule=lambda tensor: {tensor: 0})
