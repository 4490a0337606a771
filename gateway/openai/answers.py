"""OpenAI's answers: server-sent events and one document, for chat and for completions.

Every server-sent event but the last, `[DONE]`, carries as `id` the stream's position behind it
(`gateway.requests.resume`). A stream that is resumed goes on behind the position it was told, with the
events that
would have come, to the byte, and says nothing of before. A stream that fails in the middle ends with an
`error` event and without `[DONE]`.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import msgspec

from gateway.errors import HttpError
from gateway.openai.calls import Calls
from gateway.openai.logprobs import Listed, TokenList, chat_logprobs, completion_logprobs
from gateway.requests.resume import Position
from shared.events import OutputChunk, Usage

_DONE: Final = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What every piece of one answer repeats, and what was asked of its shape.

    Attributes:
        choices: how many answers there are.
        with_logprobs: whether tokens are listed with their log probabilities.
        calls: how calls of tools are read in them; None where there are none to be made.
    """

    request_id: str
    model: str
    created_s: int
    choices: int = 1
    with_logprobs: bool = False
    calls: Calls | None = None

    def of(self, object_name: str) -> dict[str, Any]:
        return {
            "id": self.request_id,
            "object": object_name,
            "created": self.created_s,
            "model": self.model,
        }


class _Stream:
    """An answer as events: the text as it comes, then why it ended."""

    object_name: ClassVar[str]

    def __init__(self, head: Head, *, includes_usage: bool = False, position: Position | None = None) -> None:
        self.media_type = "text/event-stream; charset=utf-8"
        self._head = head
        self._includes_usage = includes_usage
        self._position = position or Position.start(head.choices)
        self._tokens = [TokenList() for _ in range(head.choices)] if head.with_logprobs else None

    def chunk(self, choice: int, chunk: OutputChunk) -> bytes:
        listed = [] if self._tokens is None else self._tokens[choice].take(chunk)
        piece = self._read(choice, chunk.text)
        if self._position.has(choice, chunk.index):
            return b""
        begin = self._begin(choice)
        self._position.advance(choice, chunk.index)
        if piece is None and not listed:
            return begin
        return begin + self._said(choice, piece or self._piece(""), listed=listed)

    def ended(self, choice: int, finish_reason: str) -> bytes:
        rest = [] if self._tokens is None else self._tokens[choice].end(finish_reason)
        piece, reason = self._last(choice, finish_reason)
        if self._position.has_ended(choice):
            return b""
        begin = self._begin(choice)
        self._position.end(choice)
        return begin + self._said(choice, piece, listed=rest, finish_reason=reason)

    def complete(self, usage: Usage) -> bytes:
        if not self._includes_usage or self._position.is_complete:
            return _DONE
        self._position.complete()
        body = self._head.of(self.object_name) | {"choices": [], "usage": usage_of(usage)}
        return _event(body, self._position) + _DONE

    def failed(self, error: HttpError) -> bytes:
        return _event(error.body)

    def _said(
        self,
        choice: int,
        piece: dict[str, Any],
        *,
        listed: list[Listed] | None = None,
        finish_reason: str | None = None,
    ) -> bytes:
        said = _choice(choice, piece, finish_reason, self._logprobs(listed) if listed else None)
        body = self._head.of(self.object_name) | {"choices": [said]}
        if self._includes_usage:
            body["usage"] = None
        return _event(body, self._position)

    def _begin(self, choice: int) -> bytes:
        """What comes before the first piece of a choice."""
        return b""

    def _read(self, choice: int, text: str) -> dict[str, Any] | None:
        """What is to be told of the next text of a choice, which may be nothing yet."""
        return self._piece(text) if text else None

    def _last(self, choice: int, finish_reason: str) -> tuple[dict[str, Any], str]:
        """What is left to tell of a choice, and why it ended."""
        return self._piece(""), finish_reason

    def _piece(self, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def _logprobs(self, listed: list[Listed]) -> dict[str, Any]:
        raise NotImplementedError


class ChatStream(_Stream):
    """A chat: the role comes first, for every choice. What one chunk has of text and calls is one event."""

    object_name = "chat.completion.chunk"

    def __init__(self, head: Head, *, includes_usage: bool = False, position: Position | None = None) -> None:
        super().__init__(head, includes_usage=includes_usage, position=position)
        self._calls = [head.calls.read(head.request_id, n) for n in range(head.choices)] if head.calls else []

    def _read(self, choice: int, text: str) -> dict[str, Any] | None:
        if not self._calls:
            return super()._read(choice, text)
        delta = self._calls[choice].push(text)
        return {"delta": delta} if delta else None

    def _last(self, choice: int, finish_reason: str) -> tuple[dict[str, Any], str]:
        if not self._calls:
            return super()._last(choice, finish_reason)
        return {"delta": self._calls[choice].end()}, self._calls[choice].reason(finish_reason)

    def _begin(self, choice: int) -> bytes:
        if self._position.has_any(choice):
            return b""
        self._position.begin(choice)
        return self._said(choice, {"delta": {"role": "assistant", "content": ""}})

    def _piece(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}

    def _logprobs(self, listed: list[Listed]) -> dict[str, Any]:
        return chat_logprobs(listed)


class CompletionStream(_Stream):
    """A completion."""

    object_name = "text_completion"

    def _piece(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _logprobs(self, listed: list[Listed]) -> dict[str, Any]:
        return completion_logprobs(listed)


@dataclass(slots=True)
class _Whole:
    """One choice of a document."""

    texts: list[str] = field(default_factory=list)
    tokens: TokenList = field(default_factory=TokenList)
    listed: list[Listed] = field(default_factory=list)
    finish_reason: str | None = None


class _Document:
    """An answer as one JSON document, once it is complete."""

    object_name: ClassVar[str]

    def __init__(self, head: Head) -> None:
        self.media_type = "application/json"
        self._head = head
        self._choices = [_Whole() for _ in range(head.choices)]

    def chunk(self, choice: int, chunk: OutputChunk) -> bytes:
        whole = self._choices[choice]
        whole.texts.append(chunk.text)
        if self._head.with_logprobs:
            whole.listed += whole.tokens.take(chunk)
        return b""

    def ended(self, choice: int, finish_reason: str) -> bytes:
        whole = self._choices[choice]
        whole.finish_reason = finish_reason
        whole.listed += whole.tokens.end(finish_reason)
        return b""

    def complete(self, usage: Usage) -> bytes:
        choices = [
            _choice(
                number,
                *self._said(number, "".join(whole.texts), whole.finish_reason or ""),
                self._logprobs(whole.listed) if self._head.with_logprobs else None,
            )
            for number, whole in enumerate(self._choices)
        ]
        return msgspec.json.encode(
            self._head.of(self.object_name) | {"choices": choices, "usage": usage_of(usage)}
        )

    def failed(self, error: HttpError) -> bytes:
        raise AssertionError("a document has not begun before it is complete")

    def _said(self, choice: int, text: str, finish_reason: str) -> tuple[dict[str, Any], str]:
        """What a choice is, and why it ended."""
        raise NotImplementedError

    def _logprobs(self, listed: list[Listed]) -> dict[str, Any]:
        raise NotImplementedError


class ChatDocument(_Document):
    """A chat completion."""

    object_name = "chat.completion"

    def _said(self, choice: int, text: str, finish_reason: str) -> tuple[dict[str, Any], str]:
        message = {"role": "assistant", "content": text, "refusal": None}
        if self._head.calls is None:
            return {"message": message}, finish_reason
        calls = self._head.calls.read(self._head.request_id, choice)
        return {"message": message | calls.whole(text)}, calls.reason(finish_reason)

    def _logprobs(self, listed: list[Listed]) -> dict[str, Any]:
        return chat_logprobs(listed)


class CompletionDocument(_Document):
    """A completion."""

    object_name = "text_completion"

    def _said(self, choice: int, text: str, finish_reason: str) -> tuple[dict[str, Any], str]:
        return {"text": text}, finish_reason

    def _logprobs(self, listed: list[Listed]) -> dict[str, Any]:
        return completion_logprobs(listed)


def usage_of(usage: Usage) -> dict[str, int]:
    """Usage in OpenAI's words."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
    }


def _choice(
    index: int, said: dict[str, Any], reason: str | None, logprobs: dict[str, Any] | None
) -> dict[str, Any]:
    return {"index": index, **said, "logprobs": logprobs, "finish_reason": reason}


def _event(body: dict[str, Any], position: Position | None = None) -> bytes:
    head = b"" if position is None else b"id: %s\n" % str(position).encode()
    return head + b"data: " + msgspec.json.encode(body) + b"\n\n"
