"""The id of the token that stands for what is not decided yet. No torch."""

from pathlib import Path
from typing import Final

from models.checkpoints.files import CheckpointError, read_json_if_present
from models.text.tokenizer import load_tokenizer

_NAMES: Final = ("<|mdm_mask|>", "<|mask|>", "<mask>", "[MASK]")
"""Its usual texts, where no file names it."""


def mask_id_of(checkpoint: Path) -> int:
    """Return `mask_token_id` of `config.json`, or the tokenizer's `mask_token`, or a special token named so.

    Raises:
        CheckpointError: there is none.
    """
    found = read_json_if_present(checkpoint / "config.json").get("mask_token_id")
    if isinstance(found, int):
        return found
    tokenizer, names = load_tokenizer(checkpoint)
    for name in (names.get("mask_token"), *_NAMES):
        own = tokenizer.token_to_id(name) if name is not None else None
        if own is not None:
            return int(own)
    raise CheckpointError(
        f"{checkpoint} names no mask token: expected mask_token_id in config.json, or mask_token in "
        "tokenizer_config.json; is it a diffusion language model?"
    )
