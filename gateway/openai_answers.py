"""OpenAI's answers: server-sent events and one document, for chat and for completions.

A server-sent event carries as `id` the index of the last chunk of the output that is in it: the same
number at every gateway and for every client, because the log gave it. A stream that fails in the middle
ends with an `error` event and without `[DONE]`.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import msgspec

from gateway.errors import HttpError
from gateway.relay import Answered
from shared.events import OutputChunk, Usage

_DONE: Final = b"data: [DONE]\n\n"


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
class _Stream:
    """An answer as events: the text as it comes, then why it ended."""

    object_name: ClassVar[str]

    head: Head
    includes_usage: bool
    media_type: str = "text/event-stream; charset=utf-8"

    def failed(self, error: HttpError) -> bytes:
        return _event(error.body)

    def _said(self, said: dict[str, Any], reason: str | None = None, index: int | None = None) -> bytes:
        body = self.head.of(self.object_name) | {"choices": [_choice(said, reason)]}
        if self.includes_usage:
            body["usage"] = None
        return _event(body, index)

    def _ended(self, said: dict[str, Any], end: Answered) -> bytes:
        last = self._said(said, end.finish_reason)
        if self.includes_usage:
            last += _event(self.head.of(self.object_name) | {"choices": [], "usage": usage_of(end.usage)})
        return last + _DONE


@dataclass(slots=True)
class ChatStream(_Stream):
    """A chat: the role comes first."""

    object_name: ClassVar = "chat.completion.chunk"

    _begun: bool = False

    def chunk(self, chunk: OutputChunk) -> bytes:
        begin = self._role()
        if not chunk.text:
            return begin
        return begin + self._said({"delta": {"content": chunk.text}}, index=chunk.index)

    def answered(self, end: Answered) -> bytes:
        return self._role() + self._ended({"delta": {}}, end)

    def _role(self) -> bytes:
        if self._begun:
            return b""
        self._begun = True
        return self._said({"delta": {"role": "assistant", "content": ""}})


@dataclass(slots=True)
class CompletionStream(_Stream):
    """A completion."""

    object_name: ClassVar = "text_completion"

    def chunk(self, chunk: OutputChunk) -> bytes:
        return self._said({"text": chunk.text}, index=chunk.index) if chunk.text else b""

    def answered(self, end: Answered) -> bytes:
        return self._ended({"text": ""}, end)


@dataclass(slots=True)
class _Document:
    """An answer as one JSON document, once it is complete."""

    head: Head
    media_type: str = "application/json"
    _texts: list[str] = field(default_factory=list)

    def chunk(self, chunk: OutputChunk) -> bytes:
        self._texts.append(chunk.text)
        return b""

    def failed(self, error: HttpError) -> bytes:
        raise AssertionError("a document has not begun before it is complete")

    @property
    def _text(self) -> str:
        return "".join(self._texts)

    def _whole(self, object_name: str, said: dict[str, Any], end: Answered) -> bytes:
        choices = [_choice(said, end.finish_reason)]
        return msgspec.json.encode(
            self.head.of(object_name) | {"choices": choices, "usage": usage_of(end.usage)}
        )


class ChatDocument(_Document):
    """A chat completion."""

    def answered(self, end: Answered) -> bytes:
        message = {"role": "assistant", "content": self._text, "refusal": None}
        return self._whole("chat.completion", {"message": message}, end)


class CompletionDocument(_Document):
    """A completion."""

    def answered(self, end: Answered) -> bytes:
        return self._whole("text_completion", {"text": self._text}, end)


def usage_of(usage: Usage) -> dict[str, int]:
    """Usage in OpenAI's words."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _choice(said: dict[str, Any], reason: str | None) -> dict[str, Any]:
    return {"index": 0, **said, "logprobs": None, "finish_reason": reason}


def _event(body: dict[str, Any], index: int | None = None) -> bytes:
    head = b"" if index is None else b"id: %d\n" % index
    return head + b"data: " + msgspec.json.encode(body) + b"\n\n"
