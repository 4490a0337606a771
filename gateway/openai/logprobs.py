r"""Log probabilities as OpenAI writes them, for chats and for completions.

A token is listed once some of its text is told, so that the tokens of an answer, put together, are its
text: what a stop string cut off is not listed, nor is the token that ended the answer. (A special token in
the middle, which only comes with `ignore_eos`, is.) In a prompt that is echoed every token is listed.

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
    """The tokens of one choice, each beside its text.

    Text and tokens do not come together: text is held back while it may be the beginning of a stop string or
    the first bytes of a character, and special tokens are no part of it. So each token takes from the text
    what it spells, and waits while there is none.

    Attributes:
        told: characters of the text so far, the echoed prompt's included.
    """

    told: int = 0
    _text: str = ""  # told, and not taken by a token yet
    _ahead: str = ""  # taken by a token, and not told yet
    _waiting: deque[tuple[TokenLogprobs, str]] = field(default_factory=deque)
    _is_in_echo: bool = False
    _utf8: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace")
    )

    def take(self, chunk: OutputChunk) -> list[Listed]:
        """Take a chunk; the tokens that are to be listed with it."""
        self._enter(chunk.is_echo)
        self._tell(chunk.text)
        for token in chunk.logprobs or []:
            self._waiting.append((token, self._utf8.decode(token.token)))
        listed = []
        while self._waiting and (self._text or self._is_in_echo):  # of a prompt all tokens are listed
            listed.append(self._list())
        return listed

    def end(self, finish_reason: str) -> list[Listed]:
        """The tokens to be listed though their text did not come: not those that ended the answer."""
        if finish_reason == _STOP:
            self._waiting.clear()
        return [self._list() for _ in range(len(self._waiting))]

    def _enter(self, is_in_echo: bool) -> None:
        """Answer and prompt are decoded apart."""
        if is_in_echo != self._is_in_echo:
            self._is_in_echo = is_in_echo
            self._text = self._ahead = ""
            self._utf8.reset()

    def _tell(self, text: str) -> None:
        self.told += len(text)
        if text.startswith(self._ahead):
            self._text += text[len(self._ahead) :]
            self._ahead = ""
        elif self._ahead.startswith(text):
            self._ahead = self._ahead[len(text) :]
        else:  # the token was not what it seemed
            self._text, self._ahead = text, ""

    def _list(self) -> Listed:
        token, spelt = self._waiting.popleft()
        listed = Listed(self.told - len(self._text) + len(self._ahead), token)
        for text in (spelt, spelt.removeprefix(" ")):  # some tokenizers drop the first space of a text
            if self._text.startswith(text):
                self._text = self._text[len(text) :]
                break
            if text.startswith(self._text):
                self._ahead += text[len(self._text) :]
                self._text = ""
                break
        return listed  # a special token spells what is not in the text, and takes nothing


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
