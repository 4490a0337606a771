"""Anthropic's answers: a stream of named events, or one document.

    message_start
    content_block_start, content_block_delta ..., content_block_stop     for each thought, text and tool call
    message_delta                                                        the stop reason and the usage
    message_stop

As on OpenAI's routes, each event has as its `id` the stream's position after it, and a stream that fails
midway ends with an `error` event. The tokens of the prompt are known at the end only: `message_start` says 0.
"""

import json
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from gateway.errors import HttpError, anthropic_body
from gateway.http.lines import server_sent_event
from gateway.openai.answer_reader import TEXT_ALONE, AnswerParts, WholeMessage
from gateway.requests.response import DocumentFormat
from gateway.requests.resume import StreamPosition
from shared.events import OutputChunk, Usage

_REASONS: Final = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "content_filter": "refusal",
}
_CHOICE: Final = 0
"""A message is one answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageHead:
    """What every answer to a request repeats.

    Attributes:
        parts: what the answer may have besides text.
        stops: the client's stop sequences.
    """

    request_id: str
    model: str
    parts: AnswerParts = TEXT_ALONE
    stops: frozenset[str] = frozenset()

    def message(self, content: list[dict[str, Any]], ending: "Ending", usage: Usage) -> dict[str, Any]:
        """The message, whole or before its first block."""
        return {
            "id": self.request_id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": ending.reason,
            "stop_sequence": ending.sequence,
            "usage": usage_of(usage),
        }


@dataclass(slots=True)
class Ending:
    """Why an answer ended: None before that; `sequence` is the stop sequence that ended it."""

    reason: str | None = None
    sequence: str | None = None

    def stopped_by(self, stop: str | int | None, stops: frozenset[str]) -> None:
        if isinstance(stop, str) and stop in stops:
            self.sequence = stop

    def end(self, finish_reason: str) -> None:
        is_sequence = self.sequence is not None and finish_reason == "stop"
        self.reason = "stop_sequence" if is_sequence else _REASONS.get(finish_reason, finish_reason)


class MessageStream:
    """A message as events."""

    media_type = "text/event-stream; charset=utf-8"

    def __init__(self, head: MessageHead, position: StreamPosition) -> None:
        self._head = head
        self._position = position
        self._reader = head.parts.reader(head.request_id, _CHOICE)
        self._blocks = _Blocks()
        self._ending = Ending()

    def chunk(self, choice: int, chunk: OutputChunk) -> bytes:
        events = self._read(chunk)
        if self._position.has(choice, chunk.index):
            return b""
        begin = self._begin()
        self._position.advance(choice, chunk.index)
        return begin + self._sent(events)

    def stopped_by(self, choice: int, stop: str | int | None) -> None:
        self._ending.stopped_by(stop, self._head.stops)

    def ended(self, choice: int, finish_reason: str) -> bytes:
        events: list[dict[str, Any]] = []
        if self._reader is not None:
            events = self._blocks.add(self._reader.end())
            finish_reason = self._reader.reason(finish_reason)
        events += self._blocks.close()
        self._ending.end(finish_reason)
        if self._position.has_ended(choice):
            return b""
        begin = self._begin()
        self._position.end(choice)
        return begin + self._sent(events)

    def complete(self, usage: Usage) -> bytes:
        if self._position.is_complete:
            return b""
        self._position.complete()
        delta = {"stop_reason": self._ending.reason, "stop_sequence": self._ending.sequence}
        return self._sent(
            [{"type": "message_delta", "delta": delta, "usage": usage_of(usage)}, {"type": "message_stop"}]
        )

    def failed(self, error: HttpError) -> bytes:
        return _named(anthropic_body(error))

    def _read(self, chunk: OutputChunk) -> list[dict[str, Any]]:
        return self._blocks.add({"content": chunk.text} if self._reader is None else self._reader.push(chunk))

    def _begin(self) -> bytes:
        if self._position.has_any(_CHOICE):
            return b""
        self._position.begin(_CHOICE)
        message = self._head.message([], Ending(), Usage(prompt_tokens=0, completion_tokens=0))
        return self._sent([{"type": "message_start", "message": message}])

    def _sent(self, events: list[dict[str, Any]]) -> bytes:
        return b"".join(
            b"event: %s\n" % event["type"].encode() + server_sent_event(event, self._position)
            for event in events
        )


def _named(event: dict[str, Any], position: StreamPosition | None = None) -> bytes:
    return b"event: %s\n" % event["type"].encode() + server_sent_event(event, position)


@dataclass(slots=True)
class _Blocks:
    """The blocks of a message so far: turns OpenAI's deltas into events."""

    _index: int = -1
    _kind: str | None = None

    def add(self, delta: dict[str, Any]) -> list[dict[str, Any]]:
        """The events for a delta: its reasoning, its text, then its calls."""
        events: list[dict[str, Any]] = []
        if thought := delta.get("reasoning_content"):
            if self._kind != "thinking":
                events += self._open({"type": "thinking", "thinking": "", "signature": ""})
            events.append(self._delta({"type": "thinking_delta", "thinking": thought}))
        if text := delta.get("content"):
            if self._kind != "text":
                events += self._open({"type": "text", "text": ""})
            events.append(self._delta({"type": "text_delta", "text": text}))
        for call in delta.get("tool_calls", []):
            function = call["function"]
            if "id" in call:
                events += self._open(
                    {"type": "tool_use", "id": call["id"], "name": function["name"], "input": {}}
                )
            if function.get("arguments"):
                events.append(
                    self._delta({"type": "input_json_delta", "partial_json": function["arguments"]})
                )
        return events

    def close(self) -> list[dict[str, Any]]:
        """The events for the end of the open block, if there is one."""
        if self._kind is None:
            return []
        self._kind = None
        return [{"type": "content_block_stop", "index": self._index}]

    def _open(self, block: dict[str, Any]) -> list[dict[str, Any]]:
        closing = self.close()
        self._index += 1
        self._kind = block["type"]
        return [*closing, {"type": "content_block_start", "index": self._index, "content_block": block}]

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


@dataclass
class MessageDocument(DocumentFormat):
    """A message as one JSON document."""

    head: MessageHead
    _ending: Ending = field(default_factory=Ending)

    def __post_init__(self) -> None:
        self._message = WholeMessage(self.head.parts.reader(self.head.request_id, _CHOICE))

    def chunk(self, choice: int, chunk: OutputChunk) -> bytes:
        self._message.push(chunk)
        return b""

    def stopped_by(self, choice: int, stop: str | int | None) -> None:
        self._ending.stopped_by(stop, self.head.stops)

    def ended(self, choice: int, finish_reason: str) -> bytes:
        self._ending.end(self._message.end(finish_reason))
        return b""

    def complete(self, usage: Usage) -> bytes:
        message = self._message.content()
        content: list[dict[str, Any]] = []
        if thought := message.get("reasoning_content"):
            content.append({"type": "thinking", "thinking": thought, "signature": ""})
        if message["content"]:
            content.append({"type": "text", "text": message["content"]})
        content += [_tool_use(call) for call in message.get("tool_calls", [])]
        return msgspec.json.encode(self.head.message(content, self._ending, usage))


class CountDocument(DocumentFormat):
    """The number of a chat's tokens."""

    def complete(self, usage: Usage) -> bytes:
        return msgspec.json.encode({"input_tokens": usage.prompt_tokens})


def _tool_use(call: dict[str, Any]) -> dict[str, Any]:
    """A tool call; arguments that the model did not complete are none."""
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        arguments = {}
    return {
        "type": "tool_use",
        "id": call["id"],
        "name": function["name"],
        "input": arguments if isinstance(arguments, dict) else {},
    }


def usage_of(usage: Usage) -> dict[str, int]:
    """Usage as Anthropic counts it: tokens of the prompt that were cached are counted apart."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion_tokens,
    }
