"""The prompt of Qwen3-Reranker: is the text what the query asks for, yes or no? No torch.

The prompt is the published one. Of one that is too long, the middle part is cut, so that the question stays.
"""

from collections.abc import Sequence
from typing import Final

from tokenizers import Tokenizer

from models.reranker.pairs import Limits, Pair, cut_text
from shared.errors import ClientError

INSTRUCTION: Final = "Given a web search query, retrieve relevant passages that answer the query"
_BEFORE: Final = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
    'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_BEHIND: Final = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


class JudgePrompts:
    """Makes prompts for one model. Re-entrant; `tokenizer` neither truncates nor pads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer: Final = tokenizer
        self._before: Final[list[int]] = self._ids(_BEFORE)
        self._behind: Final[list[int]] = self._ids(_BEHIND)

    def encode(
        self, queries: Sequence[str], texts: Sequence[str], limits: Limits, instruction: str | None
    ) -> list[Pair]:
        """Make the prompt of each text with its query.

        Raises:
            ClientError: a text is no valid Unicode, or the limit leaves no room for it.
        """
        room = limits.tokens - len(self._before) - len(self._behind)
        if room < 1:
            raise ClientError(
                f"truncate_prompt_tokens: expected more than the {limits.tokens - room} tokens of the prompt "
                f"around query and text, found {limits.tokens}"
            )
        if limits.text_tokens is not None:
            texts = [cut_text(self._tokenizer, text, limits.text_tokens, limits.side) for text in texts]
        task = INSTRUCTION if instruction is None else instruction
        asked = [
            f"<Instruct>: {task}\n<Query>: {query}\n<Document>: {text}"
            for query, text in zip(queries, texts, strict=True)
        ]
        try:
            encodings = self._tokenizer.encode_batch_fast(asked, add_special_tokens=False)
        except (TypeError, UnicodeEncodeError) as error:
            raise ClientError("texts: expected valid Unicode, found a lone surrogate") from error
        for encoding in encodings:
            encoding.truncate(room, direction=limits.side)
        prompts = [[*self._before, *encoding.ids, *self._behind] for encoding in encodings]
        return [Pair(ids, [0] * len(ids)) for ids in prompts]

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def answers_of(tokenizer: Tokenizer) -> tuple[int, int] | None:
    """Return the ids of the tokens `yes` and `no`, or None if the vocabulary lacks one."""
    yes, no = tokenizer.token_to_id("yes"), tokenizer.token_to_id("no")
    return None if yes is None or no is None else (int(yes), int(no))
