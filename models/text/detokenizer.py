"""Incremental detokenizer: token ids to text, one at a time, at constant cost per token.

The concatenated pieces equal `tokenizer.decode(all, skip_special_tokens=True)`; a piece is never retracted.
There are two implementations:

- *byte-level* vocabularies (GPT-2, Llama 3, Qwen): a table has the bytes of each token, and an incremental
  UTF-8 decoder holds back incomplete characters.
- *all others* (SentencePiece and so on): the tokenizer decodes a short window, and the text that was emitted
  before is cut off its front. A run of byte tokens (`<0xE2><0x82><0xAC>`) is held back until it ends: the
  tokenizer replaces the whole run by U+FFFD if it is not valid UTF-8.

A token also has bytes by itself, as its vocabulary spells it (`bytes_of`).
"""

import codecs
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, Final

from tokenizers import Tokenizer

from models.base import TextDecoder

_CONTEXT_TOKENS: Final = 4
_MAX_HELD_TOKENS: Final = 8
"""More tokens than an incomplete character has; a replacement character is then part of the text."""
_BYTE_TOKEN: Final = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_TRIED_TOKENS: Final = 64
"""The number of tokens that are tested to find out whether texts are their tokens' bytes."""
_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"
_MARKED_SPACE: Final = "\N{LOWER ONE EIGHTH BLOCK}"
"""SentencePiece's `▁`: a space, if the tokenizer's decoder replaces it."""


class DetokenizerFactory:
    """Creates detokenizers for one tokenizer. Re-entrant."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._vocabulary = _Vocabulary(tokenizer)
        self._is_byte_level = _decoder_types(tokenizer) == ["ByteLevel"]

    def new(self) -> TextDecoder:
        """A new detokenizer, for one output."""
        return (
            _ByteLevelDecoder(self._vocabulary) if self._is_byte_level else _WindowDecoder(self._vocabulary)
        )

    @property
    def marks(self) -> frozenset[int]:
        """The special tokens, which are no part of a text."""
        return self._vocabulary.special

    def spelling(self, size: int) -> "Spelling | None":
        """The spelling of the first `size` tokens; None if texts are not their tokens' bytes."""
        vocabulary = self._vocabulary
        tokens = [vocabulary.find_own_bytes(id) for id in range(size)]
        texts = [id for id in range(size) if not vocabulary.is_silent(id) and _is_text(tokens[id])]
        spaced = next((id for id in texts if tokens[id].startswith(b" ")), None)
        drops_space = spaced is not None and not vocabulary.decode([spaced]).startswith(" ")
        tried = texts[:: max(1, len(texts) // _TRIED_TOKENS)]
        for pair in pairwise(tried):
            text = b"".join(tokens[id] for id in pair).decode()
            if vocabulary.decode(list(pair)) != (text.removeprefix(" ") if drops_space else text):
                return None
        return Spelling(tokens, drops_space=drops_space)


@dataclass(frozen=True, slots=True)
class Spelling:
    """The bytes of each token.

    Attributes:
        drops_space: a leading space of the first token is not part of the text.
    """

    tokens: list[bytes]
    drops_space: bool


class _Vocabulary:
    """Tables that the detokenizers of one tokenizer share: special tokens, and the bytes of tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        added: dict[int, Any] = tokenizer.get_added_tokens_decoder()
        self.special = frozenset(id for id, token in added.items() if token.special)
        types = _decoder_types(tokenizer)
        self._holds_byte_runs = "ByteFallback" in types
        self._spells_bytes = "ByteLevel" in types
        self._marks_spaces = _MARKED_SPACE in _decoder_json(tokenizer)
        self._byte_of = byte_of_character()
        self._bytes: dict[int, bytes] = dict.fromkeys(self.special, b"")
        self._own_bytes: dict[int, bytes] = {}

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of a byte-level token; empty for special and unknown tokens."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._find_bytes(token_id)
        return known

    def own_bytes_of(self, token_id: int) -> bytes:
        """The bytes of a token by itself: of a special token its name; empty for an unknown token."""
        known = self._own_bytes.get(token_id)
        if known is None:
            known = self._own_bytes[token_id] = self.find_own_bytes(token_id)
        return known

    def is_silent(self, token_id: int) -> bool:
        """True for a token without text: a special token, or one outside the vocabulary."""
        return token_id in self.special or self.tokenizer.id_to_token(token_id) is None

    def opens_byte_run(self, token_id: int) -> bool:
        """True for a byte token, if the tokenizer decodes runs of them as UTF-8."""
        if not self._holds_byte_runs:
            return False
        token = self.tokenizer.id_to_token(token_id)
        return token is not None and _BYTE_TOKEN.fullmatch(token) is not None

    def decode(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def find_own_bytes(self, token_id: int) -> bytes:
        """`own_bytes_of` without the table."""
        token: str | None = self.tokenizer.id_to_token(token_id)
        if token is None or token_id in self.special:
            return (token or "").encode()
        if self._spells_bytes:
            return self._find_bytes(token_id)
        if self.opens_byte_run(token_id):
            return bytes.fromhex(token[3:5])  # <0xE2>
        return (token.replace(_MARKED_SPACE, " ") if self._marks_spaces else token).encode()

    def _find_bytes(self, token_id: int) -> bytes:
        token: str | None = self.tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        cells = [self._byte_of.get(character) for character in token]
        # Added tokens are plain text and may hold characters outside the byte alphabet.
        return token.encode() if None in cells else bytes(cell for cell in cells if cell is not None)


class _ByteLevelDecoder:
    """Detokenizer of byte-level vocabularies: bytes through an incremental UTF-8 decoder."""

    __slots__ = ("_utf8", "_vocabulary")

    def __init__(self, vocabulary: _Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._utf8.decode(self._vocabulary.bytes_of(token_id))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)

    def bytes_of(self, token_id: int) -> bytes:
        return self._vocabulary.own_bytes_of(token_id)


class _WindowDecoder:
    """Detokenizer of other vocabularies: the tokenizer decodes a window of emitted and held-back tokens."""

    __slots__ = ("_held", "_held_bytes", "_shown", "_vocabulary", "_window")

    def __init__(self, vocabulary: _Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._window: list[int] = []
        self._shown = ""  # the text of the window's emitted tokens
        self._held = 0  # the number of tokens of the window that are held back
        self._held_bytes = False

    def push(self, token_id: int) -> str:
        if self._vocabulary.is_silent(token_id):
            return ""
        self._window.append(token_id)
        self._held += 1
        if self._vocabulary.opens_byte_run(token_id):
            self._held_bytes = True
            return ""
        text = self._vocabulary.decode(self._window)
        is_incomplete = text.endswith(_REPLACEMENT) and not self._held_bytes
        if is_incomplete and self._held < _MAX_HELD_TOKENS:
            return ""
        return self._show(text)

    def flush(self) -> str:
        return self._show(self._vocabulary.decode(self._window)) if self._held else ""

    def bytes_of(self, token_id: int) -> bytes:
        return self._vocabulary.own_bytes_of(token_id)

    def _show(self, text: str) -> str:
        new = text[len(self._shown) :]
        self._held, self._held_bytes = 0, False
        self._window = self._window[-_CONTEXT_TOKENS:]
        self._shown = self._vocabulary.decode(self._window)
        return new


def _is_text(data: bytes) -> bool:
    try:
        return bool(data.decode())
    except UnicodeDecodeError:
        return False


def _decoder_types(tokenizer: Tokenizer) -> list[str]:
    """The types of a tokenizer's decoders, in order."""
    if tokenizer.decoder is None:
        return []
    return list(_types_in(json.loads(tokenizer.decoder.__getstate__())))


def _decoder_json(tokenizer: Tokenizer) -> str:
    if tokenizer.decoder is None:
        return ""
    return json.dumps(json.loads(tokenizer.decoder.__getstate__()), ensure_ascii=False)


def _types_in(decoder: dict[str, Any]) -> Iterator[str]:
    if decoder["type"] != "Sequence":
        yield decoder["type"]
        return
    for part in decoder["decoders"]:
        yield from _types_in(part)


@cache
def byte_of_character() -> Mapping[str, int]:
    """The byte-level alphabet: printable Latin-1 maps to itself, other bytes to characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + place): byte for place, byte in enumerate(others)}
