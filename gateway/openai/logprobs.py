r"""Log probabilities as OpenAI writes them, for chats and for completions.

A token is listed once some of its text was sent, so that the listed tokens of an answer concatenate to its
text. Tokens that a stop string cut off are not listed, nor is the token that ended the answer. (A special
token in the middle, which only occurs with `ignore_eos`, is.) In an echoed prompt every token is listed.

Tokens are bytes, and a character may be several tokens. A chat lists each token's `bytes`, and their text as
`token`; completions have one string for both, so bytes that are not valid text alone are written as OpenAI
does: `bytes:\xe2\x80`. With `as_ids` a token is written as its id, as vLLM does: `token_id:5`.
"""

import codecs
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from shared.events import LikelyToken, OutputChunk, TokenLogprobs

LEAST: Final = -9999.0
"""OpenAI's value for a probability of (nearly) 0: JSON has no infinity."""
_STOP: Final = "stop"


@dataclass(frozen=True, slots=True)
class ListedToken:
    """A token of the text that was sent.

    Attributes:
        offset: the number of characters before it.
        end: the number of characters up to its end, those of the characters that it completes.
    """

    offset: int
    end: int
    token: TokenLogprobs


@dataclass(slots=True)
class TokenList:
    """Aligns the tokens of one choice with its text.

    Text and tokens do not arrive together: text is held back while it may be the prefix of a stop string or
    the first bytes of a character, and special tokens are no part of it. So each token consumes the text that
    it spells, and waits while there is none.

    Attributes:
        chars: the number of characters of the text so far, the echoed prompt included.
    """

    chars: int = 0
    _text: str = ""  # received, and not consumed by a token yet
    _ahead: str = ""  # consumed by a token, and not received yet
    _waiting: deque[tuple[TokenLogprobs, str]] = field(default_factory=deque)
    _is_in_echo: bool = False
    _utf8: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace")
    )

    def add(self, chunk: OutputChunk) -> list[ListedToken]:
        """Add a chunk; return the tokens to list with it."""
        self._enter(chunk.is_echo)
        self._add_text(chunk.text)
        for token in chunk.logprobs or []:
            self._waiting.append((token, self._utf8.decode(token.token)))
        listed = []
        while self._waiting and (self._text or self._is_in_echo):  # all tokens of a prompt are listed
            listed.append(self._list())
        return listed

    def end(self, finish_reason: str) -> list[ListedToken]:
        """The remaining tokens, without their text; none if they ended the answer."""
        if finish_reason == _STOP:
            self._waiting.clear()
        rest = [ListedToken(self.chars, self.chars, token) for token, _ in self._waiting]
        self._waiting.clear()
        return rest

    def _enter(self, is_in_echo: bool) -> None:
        """Decode the answer and the prompt separately."""
        if is_in_echo != self._is_in_echo:
            self._is_in_echo = is_in_echo
            self._text = self._ahead = ""
            self._utf8.reset()

    def _add_text(self, text: str) -> None:
        self.chars += len(text)
        if text.startswith(self._ahead):
            self._text += text[len(self._ahead) :]
            self._ahead = ""
        elif self._ahead.startswith(text):
            self._ahead = self._ahead[len(text) :]
        else:  # the token does not spell this text
            self._text, self._ahead = text, ""

    def _list(self) -> ListedToken:
        token, spelt = self._waiting.popleft()
        offset = self._offset
        for text in (spelt, spelt.removeprefix(" ")):  # some tokenizers drop the first space of a text
            if self._text.startswith(text):
                self._text = self._text[len(text) :]
                break
            if text.startswith(self._text):
                self._ahead += text[len(self._text) :]
                self._text = ""
                break
        return ListedToken(offset, self._offset, token)  # a special token consumes no text

    @property
    def _offset(self) -> int:
        return self.chars - len(self._text) + len(self._ahead)


def chat_logprobs(listed: Iterable[ListedToken], *, as_ids: bool = False) -> dict[str, Any]:
    """The `logprobs` of a chat's choice."""
    return {"content": token_objects(listed, as_ids=as_ids), "refusal": None}


def token_objects(listed: Iterable[ListedToken], *, as_ids: bool = False) -> list[dict[str, Any]]:
    """Tokens as chats and responses list them."""
    return [
        _chat_token(one.token, as_ids=as_ids)
        | {"top_logprobs": [_chat_token(top, as_ids=as_ids) for top in one.token.top]}
        for one in listed
    ]


def completion_logprobs(listed: Iterable[ListedToken], *, as_ids: bool = False) -> dict[str, Any]:
    """The `logprobs` of a completion's choice: four lists of the same length.

    The first token of a prompt has no log probability and no alternatives: both are null.
    """
    tokens = list(listed)
    return {
        "text_offset": [one.offset for one in tokens],
        "token_logprobs": [_or_none(one.token.logprob) for one in tokens],
        "tokens": [_in_one_string(one.token, as_ids=as_ids) for one in tokens],
        "top_logprobs": [_likely(one.token, as_ids=as_ids) for one in tokens],
    }


def _chat_token(token: TokenLogprobs | LikelyToken, *, as_ids: bool) -> dict[str, Any]:
    return {
        "token": f"token_id:{token.id}" if as_ids else token.token.decode(errors="replace"),
        "bytes": list(token.token),
        "logprob": LEAST if token.logprob is None else _finite(token.logprob),
    }


def _likely(token: TokenLogprobs, *, as_ids: bool) -> dict[str, float] | None:
    """The likeliest tokens, and the chosen one in any case."""
    if token.logprob is None:
        return None
    chosen = LikelyToken(id=token.id, token=token.token, logprob=token.logprob)
    found: dict[str, float] = {}
    for one in (*token.top, chosen):  # of two tokens with the same text, the likelier one is listed
        found.setdefault(_in_one_string(one, as_ids=as_ids), _finite(one.logprob))
    return found


def _in_one_string(token: TokenLogprobs | LikelyToken, *, as_ids: bool) -> str:
    if as_ids:
        return f"token_id:{token.id}"
    try:
        return token.token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.token)


def _or_none(logprob: float | None) -> float | None:
    return None if logprob is None else _finite(logprob)


def _finite(logprob: float) -> float:
    return max(logprob, LEAST)  # also for -inf
