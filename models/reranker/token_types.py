"""Token types, which tell a query from a text: only some cross-encoders are given them."""

from pathlib import Path
from typing import Any, Final

import transformers

from models.checkpoints.files import read_json, read_json_if_present

_TYPES: Final = "token_type_ids"


def has_types(checkpoint: Path) -> bool:
    """Return true if the folder's tokenizer gives the model token types, and the model has several.

    The tokenizer's configuration names the inputs, or the class of transformers that it names does.
    """
    if int(read_json(checkpoint / "config.json").get("type_vocab_size", 2)) < 2:
        return False
    config = read_json_if_present(checkpoint / "tokenizer_config.json")
    named = config.get("model_input_names")
    return _TYPES in (named if isinstance(named, list) else _inputs_of(config.get("tokenizer_class")))


def _inputs_of(name: Any) -> list[str]:
    """The inputs that a class of tokenizers makes; an unknown one is that of any `tokenizer.json`."""
    found = getattr(transformers, name, None) if isinstance(name, str) else None
    inputs: list[str] = getattr(found or transformers.TokenizersBackend, "model_input_names", [])
    return inputs
