"""A lower bound on the number of tokens of a text, found without encoding it.

Every byte of a text is a part of a token, in byte-level BPE. So a text has at least as many tokens as its
bytes of one class (letters, say), divided by the most such bytes in one token. Long tokens are of few classes
(128 spaces, 64 dashes): counted by class, the bound is some ten times higher than by all bytes.
"""

import json
import unicodedata
from collections.abc import Iterable
from typing import Any, Final

from tokenizers import Tokenizer

from models.text.detokenizer import byte_of_character

_NFC_JOINS: Final = 4
"""The most characters that NFC normalization composes into one."""
_CLASSES: Final = (
    bytes(range(0xF0, 0x100)),  # first bytes of characters of four bytes, such as emoji
    bytes(range(0xC0, 0xF0)),  # first bytes of other characters beyond ASCII
    bytes(byte for byte in range(0x80) if chr(byte).isalpha()),
    bytes(byte for byte in range(0x80) if chr(byte).isdigit()),
    bytes(byte for byte in range(0x80) if chr(byte).isspace()),
    bytes(byte for byte in range(0x80) if not chr(byte).isalnum() and not chr(byte).isspace()),
)


class TokenBound:
    """The bound for one tokenizer.

    Args:
        longest: the most characters that one token stands for.
        most: by class of bytes, the most of them in one token.
        is_nfc: the tokenizer normalizes texts to NFC first.
    """

    def __init__(self, longest: int, most: tuple[int, ...], *, is_nfc: bool) -> None:
        self._longest = longest * (_NFC_JOINS if is_nfc else 1)
        self._most = most
        self._is_nfc = is_nfc

    def least(self, text: str) -> int:
        """A number of tokens that the text has at least; 1 ms for a megabyte.

        Raises:
            UnicodeEncodeError: the text is not valid Unicode.
        """
        least = -(-len(text) // self._longest)
        if self._is_nfc and not unicodedata.is_normalized("NFC", text):
            return least
        data = text.encode()
        for members, most in zip(_CLASSES, self._most, strict=True):
            found = len(data) - len(data.translate(None, members))
            least = max(least, -(-found // most))
        return least


def token_bound_of(tokenizer: Tokenizer) -> TokenBound | None:
    """The bound for a tokenizer; None if there is none.

    There is one for byte-level BPE, whose tokens are written with one character per byte, with a token for
    every byte and without a normalizer that drops characters.
    """
    state = json.loads(tokenizer.to_str())
    if not _keeps_all_bytes(tokenizer, state):
        return None
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    tokens = [
        token.encode() if token in added else _spelled(token)
        for token in tokenizer.get_vocab(with_added_tokens=True)
    ]
    return TokenBound(
        max(map(len, tokens)),
        tuple(_most(tokens, members) for members in _CLASSES),
        is_nfc=state.get("normalizer") is not None,
    )


def _keeps_all_bytes(tokenizer: Tokenizer, state: dict[str, Any]) -> bool:
    splits = state.get("pre_tokenizer") or {}
    parts = splits.get("pretokenizers", [splits])
    added = tokenizer.get_added_tokens_decoder().values()
    return (
        state["model"].get("type") == "BPE"
        and byte_of_character().keys() <= tokenizer.get_vocab(with_added_tokens=False).keys()
        and (state.get("normalizer") or {"type": "NFC"})["type"] == "NFC"
        and any(part.get("type") == "ByteLevel" for part in parts)
        and not any(part.get("behavior") == "Removed" for part in parts)
        and not any(token.lstrip or token.rstrip for token in added)
    )


def _spelled(token: str) -> bytes:
    """The bytes of a token of the vocabulary."""
    table = byte_of_character()
    return bytes(table[character] for character in token if character in table)


def _most(tokens: Iterable[bytes], members: bytes) -> int:
    return max((len(token) - len(token.translate(None, members)) for token in tokens), default=0)
