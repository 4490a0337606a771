"""Ollama's answers: a line of JSON for each piece, or one document.

    {"model", "created_at", "message": {"role", "content"}, "done": false}       of a chat
    {"model", "created_at", "response", "done": false}                           of a prompt

The last line has `done`, its reason, and the tokens and durations (in nanoseconds). A tool call is one piece,
with its arguments as an object. A stream that fails midway ends with a line that has an `error`.
"""

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from gateway.errors import HttpError, ollama_body
from gateway.http.lines import json_line
from gateway.openai.answer_reader import TEXT_ALONE, AnswerParts, WholeMessage
from gateway.requests.response import DocumentFormat
from shared.events import OutputChunk, Usage

_CHOICE: Final = 0
_REASONS: Final = {"tool_calls": "stop"}


@dataclass(slots=True, kw_only=True)
class Head:
    """What every line of an answer repeats.

    Attributes:
        model: the name as the client wrote it.
        is_chat: the answer is a message, and not a response.
        begun_s: when the request came (`time.perf_counter`).
        first_s: when the first piece was there.
    """

    request_id: str
    model: str
    created_s: int
    is_chat: bool
    parts: AnswerParts = TEXT_ALONE
    begun_s: float = field(default_factory=time.perf_counter)
    first_s: float | None = None

    def note_piece(self) -> None:
        """Note that a piece is there; later ones change nothing."""
        if self.first_s is None:
            self.first_s = time.perf_counter()

    def line(
        self, content: str, thought: str = "", calls: list[dict[str, Any]] | None = None, **more: Any
    ) -> dict[str, Any]:
        """A line with a piece of the answer, or of the thoughts before it."""
        created = datetime.fromtimestamp(self.created_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        found: dict[str, Any] = {"model": self.model, "created_at": created}
        if self.is_chat:
            found["message"] = (
                {"role": "assistant", "content": content}
                | ({"thinking": thought} if thought else {})
                | ({"tool_calls": calls} if calls else {})
            )
        else:
            found["response"] = content
            if thought:
                found["thinking"] = thought
        return found | {"done": False} | more

    def loaded(self) -> dict[str, Any]:
        """The whole answer to a request without a question, by which clients load a model."""
        return self.line("", done=True, done_reason="load")

    def ending(self, reason: str, usage: Usage) -> dict[str, Any]:
        """The fields of the last line."""
        now_s = time.perf_counter()
        first_s = self.first_s or now_s
        return {
            "done": True,
            "done_reason": _REASONS.get(reason, reason),
            "total_duration": _ns(now_s - self.begun_s),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": _ns(first_s - self.begun_s),
            "eval_count": usage.completion_tokens,
            "eval_duration": _ns(now_s - first_s),
        }


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


class Lines:
    """An answer as lines."""

    media_type = "application/x-ndjson"

    def __init__(self, head: Head) -> None:
        self._head = head
        self._reader = head.parts.reader(head.request_id, _CHOICE)
        self._calls: dict[int, dict[str, str]] = {}
        self._reason = ""

    def chunk(self, choice: int, chunk: OutputChunk) -> bytes:
        self._head.note_piece()
        if self._reader is None:
            return self._line(chunk.text) if chunk.text else b""
        return self._piece(self._reader.push(chunk))

    def ended(self, choice: int, finish_reason: str) -> bytes:
        self._reason = finish_reason
        if self._reader is None:
            return b""
        rest = self._piece(self._reader.end())
        calls = _whole(self._calls.values())
        return rest + (self._line("", calls=calls) if calls else b"")

    def complete(self, usage: Usage) -> bytes:
        return json_line(self._head.line("", **self._head.ending(self._reason, usage))) + b"\n"

    def failed(self, error: HttpError) -> bytes:
        return json_line(ollama_body(error)) + b"\n"

    def _piece(self, delta: dict[str, Any]) -> bytes:
        for call in delta.get("tool_calls", []):
            known = self._calls.setdefault(call["index"], {"name": "", "arguments": ""})
            for name in known:
                known[name] += call["function"].get(name) or ""
        text, thought = delta.get("content", ""), delta.get("reasoning_content", "")
        return self._line(text, thought) if text or thought else b""

    def _line(self, text: str, thought: str = "", calls: list[dict[str, Any]] | None = None) -> bytes:
        return json_line(self._head.line(text, thought, calls)) + b"\n"


@dataclass
class Document(DocumentFormat):
    """An answer as one JSON document."""

    head: Head
    _reason: str = ""

    def __post_init__(self) -> None:
        self._message = WholeMessage(self.head.parts.reader(self.head.request_id, _CHOICE))

    def chunk(self, choice: int, chunk: OutputChunk) -> bytes:
        self.head.note_piece()
        self._message.push(chunk)
        return b""

    def ended(self, choice: int, finish_reason: str) -> bytes:
        self._message.end(finish_reason)
        self._reason = finish_reason
        return b""

    def complete(self, usage: Usage) -> bytes:
        message = self._message.content()
        line = self.head.line(
            message["content"] or "",
            message.get("reasoning_content", ""),
            _whole(call["function"] for call in message.get("tool_calls", [])),
            **self.head.ending(self._reason, usage),
        )
        return msgspec.json.encode(line)


def _whole(functions: Iterable[dict[str, str]]) -> list[dict[str, Any]]:
    """The tool calls. One that the limit cut off is left out: its arguments are no object yet."""
    found = []
    for function in functions:
        try:
            arguments = json.loads(function["arguments"])
        except ValueError:
            continue
        if isinstance(arguments, dict):
            found.append({"function": {"name": function["name"], "arguments": arguments}})
    return found
