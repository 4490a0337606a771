"""Which rank has had which beginnings: so that requests that begin alike go where that is computed.

What a request begins with is what its client wrote, cut into pieces; each is named by a digest of itself and
all before it. The conductor knows no tokens: equal text mostly is equal tokens, and where it is not, a rank
is chosen no worse than by chance. A guess of what a rank's prefix cache holds, not an account of it.
"""

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

import msgspec

from shared.events import Inputs

_PIECE_BYTES: Final = 256
_MOST_PIECES: Final = 1024
_REMEMBERED: Final = 16_384
"""Of each rank, so many pieces."""
_DIGEST_BYTES: Final = 8


def pieces(inputs: Inputs) -> list[bytes]:
    """The names of the beginnings of what a client wrote, the shortest first."""
    written = inputs.messages if inputs.messages is not None else inputs.token_ids
    text = msgspec.json.encode(written) if written is not None else (inputs.text or "").encode()
    names: list[bytes] = []
    name = b""
    for start in range(0, min(len(text), _PIECE_BYTES * _MOST_PIECES), _PIECE_BYTES):
        piece = text[start : start + _PIECE_BYTES]
        name = hashlib.blake2b(name + piece, digest_size=_DIGEST_BYTES).digest()
        names.append(name)
    return names


@dataclass(slots=True)
class Affinity:
    """What each rank had, the least recently had forgotten first."""

    had: dict[int, OrderedDict[bytes, None]] = field(default_factory=dict)

    def has(self, rank: int, names: list[bytes]) -> int:
        """How many pieces of a beginning a rank has had, without a gap."""
        known = self.had.get(rank, OrderedDict())
        return next((number for number, name in enumerate(names) if name not in known), len(names))

    def note(self, rank: int, names: list[bytes]) -> None:
        """A rank gets these now."""
        known = self.had.setdefault(rank, OrderedDict())
        for name in reversed(names):  # the beginning of a text outlives its end
            known[name] = None
            known.move_to_end(name)
        while len(known) > _REMEMBERED:
            known.popitem(last=False)

    def forget(self, rank: int) -> None:
        """A rank's life is over, and what it computed with it."""
        self.had.pop(rank, None)
