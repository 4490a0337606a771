"""The language model in a multimodal checkpoint, as a checkpoint of the class that computes it alone."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import transformers

from models.checkpoints.files import CheckpointError, UnsupportedArchitectureError, text_config
from models.transformers_lm.architecture import config_of
from models.transformers_lm.renames import Published

_PLACES: Final = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("lm_head.", "lm_head."),
)
"""What the names of the language model's tensors begin with, in files of any kind, and in its own class."""


def language_model_of(raw: Mapping[str, Any], checkpoint: Path, name: str) -> Published:
    """The language model of a multimodal checkpoint, which the class `name` of transformers computes.

    Raises:
        CheckpointError: `config.json` does not describe it.
        UnsupportedArchitectureError: transformers has no such class.
    """
    text = dict(text_config(raw))
    if text == dict(raw):
        raise CheckpointError(
            f"{checkpoint / 'config.json'}: expected text_config, the language model of "
            f"{raw.get('architectures')}; use the file that was published with the weights"
        )
    model_class = getattr(transformers, name, None)
    if model_class is None:
        raise UnsupportedArchitectureError(
            f"{checkpoint}: its language model is a {name}, which transformers {transformers.__version__} "
            "does not have: install a newer one"
        )
    if (tied := raw.get("tie_word_embeddings")) is not None:
        text["tie_word_embeddings"] = tied
    config = config_of(model_class, text, checkpoint)
    return Published(model_class=model_class, config=config, rule=_tensors_in)


def _tensors_in(name: str) -> Mapping[str, int]:
    """The tensor of the language model that a stored tensor is; none for those of other parts."""
    for stored, own in _PLACES:
        if name.startswith(stored):
            return {own + name.removeprefix(stored): 0}
    return {}
