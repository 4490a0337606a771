"""Tool calls as OpenAI writes them, in streams and in documents.

A call's id is derived from the request's id and the position of the call, and the event of a chunk from the
text up to it. So a resumed stream, at any gateway, has the same events as the uninterrupted one. See ADR 13.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from models.text.tool_call_parser import CallPiece, ParsedPiece, ToolCallParser, call_id
from models.text.tool_calls import CallFormat

_STOP: Final = "stop"
_CALLED: Final = "tool_calls"


@dataclass(frozen=True, slots=True)
class ToolCalling:
    """The settings for reading tool calls from the answers to one request.

    Attributes:
        functions: the schemas of the arguments of the functions that are offered, by name.
    """

    call_format: CallFormat
    functions: Mapping[str, Mapping[str, Any]]

    def reader(self, request_id: str, choice: int) -> "ChoiceReader":
        """A reader for one choice."""
        return ChoiceReader(self, request_id, choice)


class ChoiceReader:
    """Reads the text and the tool calls of one choice."""

    def __init__(self, calling: ToolCalling, request_id: str, choice: int) -> None:
        self._call_format = calling.call_format
        self._reader = ToolCallParser(calling.call_format, calling.functions)
        self._request_id = request_id
        self._choice = choice

    @property
    def held(self) -> int:
        """The number of the last characters that are not yet known to be text or part of a call."""
        return self._reader.held

    def push(self, text: str) -> dict[str, Any]:
        """The delta for the next text; empty if nothing is sent yet."""
        return self._delta(self._reader.push(text))

    def end(self, text: str = "") -> dict[str, Any]:
        """The delta for the last text, and for what was held back."""
        found, rest = self._reader.push(text), self._reader.end()
        found.content += rest.content
        for index, piece in rest.calls.items():
            known = found.calls.setdefault(index, CallPiece())
            known.name, known.arguments = known.name or piece.name, known.arguments + piece.arguments
        return self._delta(found)

    def reason(self, finish_reason: str) -> str:
        """The finish reason: `tool_calls` if the model stopped after a call."""
        return _CALLED if finish_reason == _STOP and self._reader.count else finish_reason

    def _delta(self, read: ParsedPiece) -> dict[str, Any]:
        delta: dict[str, Any] = {"content": read.content} if read.content else {}
        if read.calls:
            delta["tool_calls"] = [{"index": call[0], **self._call(*call)} for call in read.calls.items()]
        return delta

    def _call(self, index: int, piece: CallPiece) -> dict[str, Any]:
        if piece.name is None:
            return {"function": {"arguments": piece.arguments}}
        return {
            "id": call_id(self._request_id, self._choice, index, self._call_format),
            "type": "function",
            "function": {"name": piece.name, "arguments": piece.arguments},
        }
