"""One attempt to write the text of a window, token by token."""

import hashlib
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

Decode = Callable[[Sequence[int]], str]
"""The text of token ids, without times and special tokens."""


@dataclass(slots=True, kw_only=True, eq=False)
class Attempt:
    """The text of a window, token by token.

    Attributes:
        before: the tokens in front of it.
        temperature: 0 chooses the likeliest token.
        most: the most tokens, those in front included.
        ends: the tokens that end the text.
        seed: of the draws of this attempt.
        tokens: the chosen ones, with the one that ends the text.
        logprobs: the logarithm of the probability of each of them, at temperature 1.
        no_speech: the probability of no speech.
    """

    before: Sequence[int]
    processors: Any
    temperature: float
    most: int
    ends: Collection[int]
    seed: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    no_speech: float = 0.0
    _draw: torch.Generator = field(default_factory=torch.Generator)

    def __post_init__(self) -> None:
        self._draw.manual_seed(self.seed)

    @property
    def ids(self) -> list[int]:
        """All tokens, those in front included."""
        return [*self.before, *self.tokens]

    @property
    def is_over(self) -> bool:
        return len(self.ids) >= self.most or (bool(self.tokens) and self.tokens[-1] in self.ends)

    @property
    def text_tokens(self) -> list[int]:
        """The chosen tokens without the one that ends the text."""
        return self.tokens[:-1] if self.tokens and self.tokens[-1] in self.ends else self.tokens

    @property
    def avg_logprob(self) -> float:
        return sum(self.logprobs) / len(self.logprobs) if self.logprobs else -math.inf

    def take(self, logits: torch.Tensor) -> int:
        """Choose the next token by its logits, (vocab,) float32; return it."""
        ids = torch.tensor([self.ids], device=logits.device)
        scores = self.processors(ids, logits[None])[0].cpu()
        if self.temperature > 0:
            chances = torch.softmax(scores / self.temperature, dim=-1)
            token = int(torch.multinomial(chances, 1, generator=self._draw))
        else:
            token = int(scores.argmax())
        self.tokens.append(token)
        self.logprobs.append(float(torch.log_softmax(scores, dim=-1)[token]))
        return token


def seed_of(seed: int, family: str, seek: int, number: int) -> int:
    """The seed of an attempt's draws: 63 bits, by the request's seed and the window."""
    digest: Final = hashlib.blake2b(f"{seed}/{family}/{seek}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
