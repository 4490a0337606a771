"""The truncation of one text to a number of tokens, special tokens included. No torch."""

from dataclasses import dataclass
from typing import Literal, Self

from tokenizers import Tokenizer

from shared.errors import ClientError
from shared.events import Params

Side = Literal["left", "right"]


@dataclass(frozen=True, slots=True)
class Truncation:
    """The most tokens of a text; `side` is the end at which a longer one is cut."""

    limit: int
    side: Side

    @classmethod
    def of(cls, params: Params, *, longest: int, side: str) -> Self | None:
        """Return the truncation that a request asks for; None for none.

        Args:
            params: the parameters of the request.
            longest: the most tokens that the model takes.
            side: the tokenizer's own side.
        """
        if params.truncate_prompt_tokens is None and params.truncation_side is None:
            return None
        asked = params.truncate_prompt_tokens or -1
        chosen = params.truncation_side or ("left" if side == "left" else "right")
        return cls(longest if asked == -1 else min(asked, longest), chosen)

    def of_ids(self, ids: list[int]) -> list[int]:
        """Return token ids that a client sent, cut."""
        return ids[-self.limit :] if self.side == "left" else ids[: self.limit]

    def of_text(self, tokenizer: Tokenizer, text: str) -> list[int]:
        """Return the token ids of a text, cut before the special tokens are added, which all stay.

        Raises:
            ClientError: there is no room beside the special tokens.
        """
        room = self.limit - tokenizer.num_special_tokens_to_add(is_pair=False)
        if room < 1:
            raise ClientError(
                f"truncate_prompt_tokens: expected more than the {self.limit - room} special tokens of a "
                f"text, found {self.limit}"
            )
        [bare] = tokenizer.encode_batch_fast([text], add_special_tokens=False)
        bare.truncate(room, direction=self.side)
        ids: list[int] = tokenizer.post_process(bare).ids
        return ids
