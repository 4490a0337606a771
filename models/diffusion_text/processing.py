"""The CPU node `prepare` of diffusion language models: that of `models.decoder_lm`, with other defaults.

The published samplers are greedy unless they are asked for a temperature, so the sampling defaults in
`generation_config.json` have no effect. Guides are refused, for tokens are decided in any order.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from models.decoder_lm.processing import DecoderLmProcessing, TextFiles
from models.text.chat_prompts import ChatPrompts
from models.text.tokenizer import load_tokenizer
from shared.errors import ClientError
from shared.events import Guide, Params

_DEFAULTS: Final = Params(temperature=0.0)


def load(checkpoint: Path, *, max_seq_len: int) -> "DiffusionTextProcessing":
    """Load the tokenizer and the chat templates of a checkpoint.

    Raises:
        CheckpointError: a file is missing or malformed.
        ChatTemplateError: a chat template is no valid Jinja.
    """
    return load_with(checkpoint, max_seq_len=max_seq_len)


def load_with(
    checkpoint: Path, *, max_seq_len: int, turn_ends: Sequence[str] = ()
) -> "DiffusionTextProcessing":
    """Load as `load` does; `turn_ends` are special tokens that end an answer too, where they exist."""
    tokenizer, names = load_tokenizer(checkpoint)
    text = TextFiles.read(checkpoint, tokenizer, names, ChatPrompts.read(checkpoint, names))
    ends = (tokenizer.token_to_id(token) for token in turn_ends)
    eos_ids = tuple(dict.fromkeys((*text.eos_ids, *(end for end in ends if end is not None))))
    text = replace(text, defaults=_DEFAULTS, eos_ids=eos_ids)
    return DiffusionTextProcessing(text, max_seq_len=max_seq_len)


class DiffusionTextProcessing(DecoderLmProcessing):
    """The CPU nodes of one checkpoint (`models.base.Processing`). Re-entrant."""

    def _check_guide(self, _: Guide, stop_token_ids: Sequence[int]) -> None:
        raise ClientError(
            "guide: a diffusion language model decides tokens in any order, so its answers cannot be guided; "
            "leave response_format, tool_choice and structured outputs out",
            code="not_supported",
        )
