"""Prompt echo (`echo` of OpenAI completions): chunks with the prompt, emitted before the generated text.

The prompt is cut into pieces that fit an event; each piece has a proportional share of the text and of the
tokens. The cut depends on the prompt alone, so every attempt makes the same pieces. With log probabilities, a
piece waits until the engine has scored its tokens.

A piece that an earlier attempt emitted is recognised by its text and token ids. Its log probabilities are
neither compared nor computed again: another batch rounds them differently, and nothing depends on them.
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
"""Limits of a piece without log probabilities: a fraction of what an event can hold."""


@dataclass(frozen=True, slots=True)
class EchoPiece:
    """Tokens `start` to `end` (exclusive) of a prompt, with the same share of its text."""

    start: int
    end: int
    content: Mapping[str, Any]


def echo_pieces(prompt_ids: Sequence[int], text: str, top: int | None) -> list[EchoPiece]:
    """Cut a prompt into pieces.

    `text` is empty if only the ids are asked for. `top` is the number of alternatives listed with each
    token's log probability; None without any.
    """
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
    """A token's score in the form that clients get: with the bytes of each token."""
    return TokenLogprobs(
        id=score.token_id,
        token=bytes_of(score.token_id),
        logprob=score.logprob,
        top=[LikelyToken(id=id, token=bytes_of(id), logprob=logprob) for id, logprob in score.top],
    )


class ScoredEcho:
    """The echo pieces that wait for the scores of their tokens.

    Args:
        waiting: the pieces to emit, in order.
        bytes_of: returns the bytes of a token.
    """

    def __init__(self, waiting: Iterable[EchoPiece], bytes_of: Callable[[int], bytes]) -> None:
        self._waiting = deque(waiting)
        self._bytes_of = bytes_of
        self._position = 0  # of the next token in the prompt
        self._scores: list[TokenLogprobs] = []  # of the first waiting piece's tokens

    @property
    def complete(self) -> bool:
        """True once every piece was emitted."""
        return not self._waiting

    def begin(self, token_id: int) -> list[Mapping[str, Any]]:
        """Take the prompt's first token, which has no log probability because no token precedes it."""
        return list(self._take(TokenLogprobs(id=token_id, token=self._bytes_of(token_id))))

    def push(self, scores: Iterable[TokenScore]) -> list[Mapping[str, Any]]:
        """Take the scores of the next tokens; return the chunks that they complete."""
        return [content for score in scores for content in self._take(token_logprobs(score, self._bytes_of))]

    def _take(self, score: TokenLogprobs) -> Iterator[Mapping[str, Any]]:
        if self._waiting and self._position >= self._waiting[0].start:
            self._scores.append(score)
        self._position += 1
        while self._waiting and self._position >= self._waiting[0].end:
            yield {**self._waiting.popleft().content, "logprobs": self._scores}
            self._scores = []
