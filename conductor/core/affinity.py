"""Prefix affinity: the prompt prefixes that each rank has computed, for sending similar prompts to one rank.

The prompt, as the client wrote it, is cut into pieces; a digest of each piece and all before it names a
prefix. The conductor has no tokenizer: equal text usually means equal tokens, and where it does not, the
choice of the rank is no worse than random. This is an estimate of a rank's prefix cache, not an account of
it.
"""

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from shared.events import Inputs

_PIECE_BYTES: Final = 256
_MOST_PIECES: Final = 1024
_REMEMBERED: Final = 16_384
"""Prefixes remembered per rank."""
_DIGEST_BYTES: Final = 8


def pieces(inputs: Inputs) -> list[bytes]:
    """The names of a prompt's prefixes, shortest first."""
    written: list[Any] | None = inputs.texts or inputs.token_ids
    if inputs.messages is not None:
        written = _with_digests(inputs)
    text = msgspec.json.encode(written) if written is not None else _text_of(inputs).encode()
    names: list[bytes] = []
    name = b""
    for start in range(0, min(len(text), _PIECE_BYTES * _MOST_PIECES), _PIECE_BYTES):
        piece = text[start : start + _PIECE_BYTES]
        name = hashlib.blake2b(name + piece, digest_size=_DIGEST_BYTES).digest()
        names.append(name)
    return names


def _text_of(inputs: Inputs) -> str:
    """The text of a request, after the digests of its files."""
    return "".join(medium.digest for medium in inputs.files) + (inputs.text or "")


def _with_digests(inputs: Inputs) -> list[Any]:
    """The messages, with the digest of each medium in the place of its number."""
    digests = [medium.digest for medium in inputs.files]

    def part_of(part: Any) -> Any:
        number = part.get("file") if isinstance(part, dict) else None
        if isinstance(number, int) and 0 <= number < len(digests):
            return {**part, "file": digests[number]}
        return part

    return [
        {**message, "content": [part_of(part) for part in message["content"]]}
        if isinstance(message.get("content"), list)
        else message
        for message in inputs.messages or []
    ]


@dataclass(slots=True)
class Affinity:
    """The prefixes of each rank; the least recently used are forgotten first."""

    prefixes: dict[int, OrderedDict[bytes, None]] = field(default_factory=dict)

    def has(self, rank: int, names: list[bytes]) -> int:
        """The number of leading pieces that a rank has computed, without a gap."""
        known = self.prefixes.get(rank, OrderedDict())
        return next((number for number, name in enumerate(names) if name not in known), len(names))

    def note(self, rank: int, names: list[bytes]) -> None:
        """Record that a rank computes these prefixes now."""
        known = self.prefixes.setdefault(rank, OrderedDict())
        for name in reversed(names):  # a short prefix is kept longer than the prompts that share it
            known[name] = None
            known.move_to_end(name)
        while len(known) > _REMEMBERED:
            known.popitem(last=False)

    def forget(self, rank: int) -> None:
        """Forget a rank whose incarnation is over: its cache is gone."""
        self.prefixes.pop(rank, None)
