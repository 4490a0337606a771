"""Texts to token ids, cut to a length as sentence-transformers does. No torch."""

from collections.abc import Sequence
from typing import Final, Literal

from tokenizers import Encoding, Tokenizer
from tokenizers.normalizers import Lowercase
from tokenizers.normalizers import Sequence as Normalizers

from shared.errors import ClientError

Side = Literal["left", "right"]


class TextTokenizer:
    """Encodes texts for one model. Re-entrant.

    Args:
        tokenizer: without truncation and padding.
        vocab_size: the number of rows of the model's embedding.
        side: the end at which texts are cut unless a request says another.
    """

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, side: Side = "right") -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self.side: Final = side
        self.special_tokens: Final[int] = tokenizer.num_special_tokens_to_add(is_pair=False)

    def encode(
        self, texts: Sequence[str | list[int]], *, limit: int, cut: Side | None, names: Sequence[str]
    ) -> list[list[int]]:
        """The token ids of texts, special tokens included; token ids stay as they are, but for the length.

        Args:
            texts: texts, or token ids.
            limit: the most tokens of each.
            cut: the end at which longer ones are cut; None refuses them.
            names: a name of each text, for error messages.

        Raises:
            ClientError: a text has no tokens, too many, or is not valid Unicode; or a token id is unknown.
        """
        encodings = iter(self._encodings([text for text in texts if isinstance(text, str)]))
        found = []
        for text, name in zip(texts, names, strict=True):
            if isinstance(text, str):
                ids = self._cut(next(encodings), text, limit, cut, name)
            else:
                ids = self._checked(text, limit, cut, name)
            if not ids:
                raise ClientError(f"{name}: expected at least one token, found none")
            found.append(ids)
        return found

    def count_without_end(self, prompt: str) -> int:
        """The tokens of a prompt alone, without a special token at its end."""
        if not prompt:
            return 0
        [encoding] = self._encodings([prompt])
        return len(encoding.ids) - (1 if encoding.special_tokens_mask[-1:] == [1] else 0)

    def _encodings(self, texts: list[str]) -> list[Encoding]:
        try:
            # The batch call lets other threads run; `encode` does not.
            found: list[Encoding] = self._tokenizer.encode_batch_fast(texts)
        except (TypeError, UnicodeEncodeError) as error:
            raise ClientError("expected valid Unicode texts, found a lone surrogate") from error
        return found

    def _cut(self, encoding: Encoding, text: str, limit: int, cut: Side | None, name: str) -> list[int]:
        ids: list[int] = encoding.ids
        if len(ids) <= limit:
            return ids
        if cut is None:
            raise _too_long(name, len(ids), limit)
        if limit <= self.special_tokens:
            raise ClientError(
                f"truncate_prompt_tokens: expected more than the {self.special_tokens} special tokens of a "
                f"text, found {limit}"
            )
        # Cut before the special tokens are added, which all stay.
        [bare] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        bare.truncate(limit - self.special_tokens, direction=cut)
        whole: list[int] = self._tokenizer.post_process(bare).ids
        return whole

    def _checked(self, ids: list[int], limit: int, cut: Side | None, name: str) -> list[int]:
        wrong = next((id for id in ids if not 0 <= id < self._vocab_size), None)
        if wrong is not None:
            raise ClientError(
                f"{name}: token id {wrong} is outside the model's vocabulary of {self._vocab_size}",
                code="invalid_token_id",
            )
        if len(ids) > limit and cut is None:
            raise _too_long(name, len(ids), limit)
        return ids[-limit:] if cut == "left" else ids[:limit]


def lower_cased(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer, which makes texts lower-case first."""
    before = tokenizer.normalizer
    tokenizer.normalizer = Lowercase() if before is None else Normalizers([Lowercase(), before])
    return tokenizer


def _too_long(name: str, tokens: int, limit: int) -> ClientError:
    return ClientError(
        f"the model takes texts of {limit} tokens, but {name} has {tokens}; shorten it, or let it be cut by "
        "truncate_prompt_tokens (-1: to the model's length)",
        code="context_length_exceeded",
    )
