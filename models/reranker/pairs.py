"""A query and a text as the tokens of a cross-encoder, cut to a length as transformers does. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from tokenizers import Encoding, Tokenizer

from shared.errors import ClientError

Side = Literal["left", "right"]


@dataclass(frozen=True, slots=True)
class Pair:
    """The token ids of a pair, and their types: 0 for the query, 1 for the text."""

    ids: list[int]
    types: list[int]


@dataclass(frozen=True, slots=True)
class Limits:
    """The most tokens of a pair and of its text, and the end at which texts are cut."""

    tokens: int
    text_tokens: int | None
    side: Side


def cut_text(tokenizer: Tokenizer, text: str, tokens: int, side: Side) -> str:
    """Return the first or last `tokens` tokens of a text, as a text."""
    places = tokenizer.encode(text, add_special_tokens=False).offsets
    if len(places) <= tokens:
        return text
    return text[: places[tokens - 1][1]] if side == "right" else text[places[-tokens][0] :]


class PairTokenizer:
    """Encodes pairs for one model. Re-entrant; `tokenizer` neither truncates nor pads.

    `prompt` is a text that is put before each query.
    """

    def __init__(self, tokenizer: Tokenizer, *, prompt: str = "") -> None:
        self._tokenizer: Final = tokenizer
        self._prompt: Final = prompt
        self._specials: Final[int] = tokenizer.num_special_tokens_to_add(is_pair=True)

    def encode(self, queries: Sequence[str], texts: Sequence[str], limits: Limits) -> list[Pair]:
        """Encode each text with its query.

        Raises:
            ClientError: a text is no valid Unicode, or the limit leaves no room for it.
        """
        room = limits.tokens - self._specials
        if room < 2:
            raise ClientError(
                f"truncate_prompt_tokens: expected at least {self._specials + 2}, because a pair has "
                f"{self._specials} special tokens, found {limits.tokens}"
            )
        queries = [self._prompt + query for query in queries]
        unique = [*dict.fromkeys(queries)]
        known = dict(zip(unique, self._encodings(unique, "queries"), strict=True))
        return [
            self._pair(query, known[query], text, room, limits)
            for query, text in zip(queries, self._encodings(texts, "texts"), strict=True)
        ]

    def _pair(self, query: str, encoded: Encoding, text: Encoding, room: int, limits: Limits) -> Pair:
        if limits.text_tokens is not None:
            text.truncate(limits.text_tokens, direction=limits.side)
        of_query, of_text = longest_first(len(encoded), len(text), room)
        if of_query < len(encoded):
            [encoded] = self._encodings([query], "queries")  # other pairs have it whole
            encoded.truncate(of_query, direction=limits.side)
        text.truncate(of_text, direction=limits.side)
        whole = self._tokenizer.post_process(encoded, text)
        return Pair(whole.ids, whole.type_ids)

    def _encodings(self, texts: Sequence[str], what: str) -> list[Encoding]:
        try:
            found: list[Encoding] = self._tokenizer.encode_batch_fast([*texts], add_special_tokens=False)
        except (TypeError, UnicodeEncodeError) as error:
            raise ClientError(f"{what}: expected valid Unicode, found a lone surrogate") from error
        return found


def longest_first(first: int, second: int, room: int) -> tuple[int, int]:
    """Return the lengths to which a pair is cut: the longer one gives way, until both have half the room."""
    if first + second <= room:
        return first, second
    shorter = min(first, second)
    longer = max(shorter, room - shorter)
    if shorter + longer > room:
        shorter, longer = room // 2, room - room // 2
    return (shorter, longer) if first <= second else (longer, shorter)
