"""An echo: the prompt, as the chunks that come before an answer.

It is cut by the prompt alone, so that every attempt cuts it alike: into pieces an event can hold, each
with its share of the prompt's text and tokens. Where log probabilities are wanted, a piece waits for the
engine to have scored its tokens.

What an earlier attempt put out is known by text and token ids. Its log probabilities are not compared:
another batch rounds them otherwise, and nothing rests on them. So they are not computed again either.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from shared.events import LikelyToken, TokenLogprobs
from workers.generation.output_chunks import tokens_per_chunk
from workers.kv_engine.outputs import TokenScore

_MAX_TOKENS: Final = 16_384
_MAX_CHARS: Final = 65_536
"""Of a piece without log probabilities: a fraction of what an event can hold."""


@dataclass(frozen=True, slots=True)
class EchoPiece:
    """Tokens `start` to `end` of a prompt, and a share of its text as large."""

    start: int
    end: int
    content: Mapping[str, Any]


def pieces(prompt_ids: Sequence[int], text: str, top: int | None) -> list[EchoPiece]:
    """A prompt, cut; `top` is how many of the likeliest tokens come with each of its own."""
    most = _MAX_TOKENS if top is None else tokens_per_chunk(top)
    count = max(-(-len(prompt_ids) // most), -(-len(text) // _MAX_CHARS))
    ids, chars = (
        [size * place // count for place in range(count + 1)] for size in (len(prompt_ids), len(text))
    )
    return [
        EchoPiece(
            ids[n],
            ids[n + 1],
            {
                "text": text[chars[n] : chars[n + 1]],
                "metadata": {"echo": True, "token_ids": list(prompt_ids[ids[n] : ids[n + 1]])},
            },
        )
        for n in range(count)
    ]


def token_logprobs(score: TokenScore, bytes_of: Callable[[int], bytes]) -> TokenLogprobs:
    """A token's score as clients get it: with the tokens' bytes."""
    return TokenLogprobs(
        id=score.token_id,
        token=bytes_of(score.token_id),
        logprob=score.logprob,
        top=[LikelyToken(id=id, token=bytes_of(id), logprob=logprob) for id, logprob in score.top],
    )


class ScoredEcho:
    """Pieces of a prompt that wait for their tokens' scores.

    Args:
        waiting: the pieces that are to be put out, in order.
        bytes_of: a token's own bytes.
    """

    def __init__(self, waiting: Iterable[EchoPiece], bytes_of: Callable[[int], bytes]) -> None:
        self._waiting = deque(waiting)
        self._bytes_of = bytes_of
        self._at = 0  # the place of the token that comes next
        self._told: list[TokenLogprobs] = []  # of the first piece's tokens

    @property
    def complete(self) -> bool:
        """Whether no piece waits any more."""
        return not self._waiting

    def begin(self, token_id: int) -> list[Mapping[str, Any]]:
        """The first token: before it stands nothing, so the model thought nothing of it."""
        return list(self._take(TokenLogprobs(id=token_id, token=self._bytes_of(token_id))))

    def push(self, scores: Iterable[TokenScore]) -> list[Mapping[str, Any]]:
        """The next tokens; the chunks that are complete by them."""
        return [content for score in scores for content in self._take(token_logprobs(score, self._bytes_of))]

    def _take(self, told: TokenLogprobs) -> Iterator[Mapping[str, Any]]:
        if self._waiting and self._at >= self._waiting[0].start:
            self._told.append(told)
        self._at += 1
        while self._waiting and self._at >= self._waiting[0].end:
            yield {**self._waiting.popleft().content, "logprobs": self._told}
            self._told = []
