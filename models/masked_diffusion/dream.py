"""Dream's checkpoints as transformers' Qwen2: the same layers and names, but every token sees all others."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM

from models.checkpoints.files import UnsupportedArchitectureError
from models.transformers_lm.architecture import config_of
from models.transformers_lm.renames import Published

MODEL_TYPE: Final = "Dream"


def published(raw: Mapping[str, Any], checkpoint: Path) -> Published:
    """Translate the `config.json` of a checkpoint.

    Raises:
        CheckpointError: a value is invalid.
        UnsupportedArchitectureError: the checkpoint has a sliding window.
    """
    if raw.get("use_sliding_window"):
        raise UnsupportedArchitectureError(
            f"{checkpoint}: Dream with a sliding window is not served: expected use_sliding_window to be "
            "false, as in the published checkpoints"
        )
    translated = {**raw, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    config = config_of(Qwen2ForCausalLM, translated, checkpoint)
    return Published(model_class=Qwen2ForCausalLM, config=config, rule=lambda tensor: {tensor: 0})
