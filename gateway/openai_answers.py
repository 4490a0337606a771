"""OpenAI's answers: server-sent events and one document, for chat and for completions.

A server-sent event carries as `id` the index of the last chunk of the output that is in it: the same
number at every gateway and for every client, because the log gave it. A stream that fails in the middle
ends with an `error` event and without `[DONE]`.
"""

from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from gateway.errors import HttpError
from gateway.relay import Answered
from shared.events import OutputChunk, Usage

_DONE: Final = b"data: [DONE]\n\n"
EVENT_STREAM: Final = "text/event-stream; charset=utf-8"


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What every piece of one answer repeats."""

    request_id: str
    model: str
    created_s: int

    def of(self, object_name: str) -> dict[str, Any]:
        return {
            "id": self.request_id,
            "object": object_name,
            "created": self.created_s,
            "model": self.model,
        }


@dataclass(slots=True)
class ChatStream:
    """A chat as events: the role first, then the text as it comes, then why it ended."""

    head: Head
    includes_usage: bool
    media_type: str = EVENT_STREAM
    _begun: bool = False

    def chunk(self, chunk: OutputChunk) -> bytes:
        begin = self._role()
        if not chunk.text:
            return begin
        return begin + self._event({"content": chunk.text}, None, chunk.index)

    def answered(self, end: Answered) -> bytes:
        last = self._role() + self._event({}, end.finish_reason)
        if self.includes_usage:
            last += _event(
                self.head.of("chat.completion.chunk") | {"choices": [], "usage": usage_of(end.usage)}
            )
        return last + _DONE

    def failed(self, error: HttpError) -> bytes:
        return _event(error.body)

    def _role(self) -> bytes:
        if self._begun:
            return b""
        self._begun = True
        return self._event({"role": "assistant", "content": ""}, None)

    def _event(self, delta: dict[str, Any], reason: str | None, index: int | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        body = self.head.of("chat.completion.chunk") | {"choices": [choice]}
        if self.includes_usage:
            body["usage"] = None
        return _event(body, index)


@dataclass(slots=True)
class CompletionStream:
    """A completion as events: the text as it comes, then why it ended."""

    head: Head
    includes_usage: bool
    media_type: str = EVENT_STREAM

    def chunk(self, chunk: OutputChunk) -> bytes:
        return self._event(chunk.text, None, chunk.index) if chunk.text else b""

    def answered(self, end: Answered) -> bytes:
        last = self._event("", end.finish_reason)
        if self.includes_usage:
            last += _event(self.head.of("text_completion") | {"choices": [], "usage": usage_of(end.usage)})
        return last + _DONE

    def failed(self, error: HttpError) -> bytes:
        return _event(error.body)

    def _event(self, text: str, reason: str | None, index: int | None = None) -> bytes:
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}
        body = self.head.of("text_completion") | {"choices": [choice]}
        if self.includes_usage:
            body["usage"] = None
        return _event(body, index)


@dataclass(slots=True)
class _Document:
    """One JSON document, once the answer is complete."""

    head: Head
    media_type: str = "application/json"
    _texts: list[str] = field(default_factory=list)

    def chunk(self, chunk: OutputChunk) -> bytes:
        self._texts.append(chunk.text)
        return b""

    def failed(self, error: HttpError) -> bytes:
        raise AssertionError("a document has not begun before it is complete")

    @property
    def text(self) -> str:
        return "".join(self._texts)


class ChatDocument(_Document):
    """A chat completion."""

    def answered(self, end: Answered) -> bytes:
        message = {"role": "assistant", "content": self.text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": end.finish_reason}
        return msgspec.json.encode(
            self.head.of("chat.completion") | {"choices": [choice], "usage": usage_of(end.usage)}
        )


class CompletionDocument(_Document):
    """A completion."""

    def answered(self, end: Answered) -> bytes:
        choice = {"index": 0, "text": self.text, "logprobs": None, "finish_reason": end.finish_reason}
        return msgspec.json.encode(
            self.head.of("text_completion") | {"choices": [choice], "usage": usage_of(end.usage)}
        )


def usage_of(usage: Usage) -> dict[str, int]:
    """Usage in OpenAI's words."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _event(body: dict[str, Any], index: int | None = None) -> bytes:
    head = b"" if index is None else b"id: %d\n" % index
    return head + b"data: " + msgspec.json.encode(body) + b"\n\n"
