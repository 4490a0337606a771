"""dllm-hub's models (`a2d-qwen3` and the like): those of transformers, with another mask."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from models.transformers_lm.architecture import config_of, model_class_of
from models.transformers_lm.renames import Published

CLASSES: Final = {
    "a2d-llama": ("llama", "LlamaForCausalLM"),
    "a2d-qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "a2d-qwen3": ("qwen3", "Qwen3ForCausalLM"),
}
"""The `model_type` and the class of transformers, by the published `model_type`."""


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
