"""Tokens of texts in a trace, by a checkpoint's tokenizer."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from dalsegno.traces.calls import TraceError


def of_checkpoint(checkpoint: str) -> Callable[[str], list[int]]:
    """Return a function that gives the tokens of a text, without a chat template.

    The file is read when the first text comes: traces of lengths need none.
    """
    path = Path(checkpoint, "tokenizer.json")

    @cache
    def loaded() -> Any:
        try:
            from tokenizers import Tokenizer
        except ModuleNotFoundError as error:
            raise TraceError(
                "the trace has texts, whose tokens are counted by tokenizers, which is not installed: "
                "pip install 'dalsegno[worker]'"
            ) from error
        if not path.is_file():
            raise TraceError(
                f"the trace has texts, whose tokens are counted by the recorded run's checkpoint: expected "
                f"{path}, found no such file"
            )
        return Tokenizer.from_file(str(path))

    def tokens_of(text: str) -> list[int]:
        found: list[int] = loaded().encode(text, add_special_tokens=False).ids
        return found

    return tokens_of
