r"""Log probabilities as OpenAI writes them, for chats and for completions.

A token is listed once some of its text is told, so that the tokens of an answer, put together, are its
text: what a stop string cut off is not listed, nor is the token that ended the answer, which has no text.
In a prompt that is echoed every token is listed.

Tokens are bytes, and a character may be several tokens. A chat gives each token's `bytes`, and as `token`
what of them is text; completions have one string for both, so bytes that are no text by themselves are
written as OpenAI writes them: `bytes:\xe2\x80`.
"""

import codecs
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from shared.events import LikelyToken, OutputChunk, TokenLogprobs

LEAST: Final = -9999.0
"""What stands for a probability of (nearly) nothing: JSON has no infinity, and OpenAI's own is this."""
_STOP: Final = "stop"


@dataclass(frozen=True, slots=True)
class Listed:
    """A token of the text that is told. `offset` counts the characters of the text before it."""

    offset: int
    token: TokenLogprobs


@dataclass(slots=True)
class TokenList:
    """The tokens of one choice, listed as their text is told.

    Attributes:
        told: characters of the text so far, the echoed prompt's included.
        read: characters in the tokens so far; ahead of `told` while text is held back.
    """

    told: int = 0
    read: int = 0
    _waiting: deque[Listed] = field(default_factory=deque)
    _is_aligned: bool = False
    _utf8: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace")
    )

    def take(self, chunk: OutputChunk) -> list[Listed]:
        """Take a chunk; the tokens that are to be listed with it."""
        if is_echo(chunk):
            return self._take_echo(chunk)
        for token in chunk.logprobs or []:
            self._read(token)
        if chunk.text and not self._is_aligned:
            self._align(chunk.text)
        self.told += len(chunk.text)
        listed = []
        while self._waiting and self._waiting[0].offset < self.told:
            listed.append(self._waiting.popleft())
        return [one for one in listed if one.token.token]

    def end(self, finish_reason: str) -> list[Listed]:
        """The tokens whose text was still to come when the answer ended."""
        rest = [] if finish_reason == _STOP else [one for one in self._waiting if one.token.token]
        self._waiting.clear()
        return rest

    def _read(self, token: TokenLogprobs) -> None:
        self._waiting.append(Listed(self.read, token))
        self.read += len(self._utf8.decode(token.token))

    def _align(self, text: str) -> None:
        """Some tokenizers drop the space that the first token of a text begins with."""
        self._is_aligned = True
        first = self._waiting[0].token.token if self._waiting else b""
        if first.startswith(b" ") and not text.startswith(" "):
            self.read -= 1
            self._waiting = deque(Listed(max(self.told, one.offset - 1), one.token) for one in self._waiting)

    def _take_echo(self, chunk: OutputChunk) -> list[Listed]:
        """The prompt: all of it is told at once, also the tokens that have no text."""
        for token in chunk.logprobs or []:
            self._read(token)
        begin, self.told = self.told, self.told + len(chunk.text)
        listed = [Listed(max(begin, min(one.offset, self.told)), one.token) for one in self._waiting]
        self._waiting.clear()
        self._utf8.reset()
        self.read = self.told
        return listed


def is_echo(chunk: OutputChunk) -> bool:
    """Whether a chunk is the prompt, and not of the answer."""
    return bool(chunk.metadata.get("echo"))


def chat_logprobs(listed: Iterable[Listed]) -> dict[str, Any]:
    """`logprobs` of a chat's choice."""
    content = [
        _chat_token(one.token.token, one.token.logprob)
        | {"top_logprobs": [_chat_token(top.token, top.logprob) for top in one.token.top]}
        for one in listed
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(listed: Iterable[Listed]) -> dict[str, Any]:
    """`logprobs` of a completion's choice: four lists of the same length.

    The first token of a prompt has no probability, and nothing else was likely there: both are null.
    """
    tokens = list(listed)
    return {
        "text_offset": [one.offset for one in tokens],
        "token_logprobs": [_or_none(one.token.logprob) for one in tokens],
        "tokens": [_in_one_string(one.token.token) for one in tokens],
        "top_logprobs": [_likely(one.token) for one in tokens],
    }


def _chat_token(token: bytes, logprob: float | None) -> dict[str, Any]:
    return {
        "token": token.decode(errors="replace"),
        "bytes": list(token),
        "logprob": LEAST if logprob is None else _finite(logprob),
    }


def _likely(token: TokenLogprobs) -> dict[str, float] | None:
    """The likeliest tokens, and the one that was taken, whether it is among them or not."""
    if token.logprob is None:
        return None
    taken = LikelyToken(id=token.id, token=token.token, logprob=token.logprob)
    found: dict[str, float] = {}
    for one in (*token.top, taken):  # two tokens may look alike: the likelier one is meant
        found.setdefault(_in_one_string(one.token), _finite(one.logprob))
    return found


def _in_one_string(token: bytes) -> str:
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def _or_none(logprob: float | None) -> float | None:
    return None if logprob is None else _finite(logprob)


def _finite(logprob: float) -> float:
    return max(logprob, LEAST)  # which also is what -inf becomes
