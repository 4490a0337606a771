"""Calls of tools as OpenAI writes them, in streams and in documents.

A call's id is made from the request's id and the place of the call, and what is told of a chunk from the
text up to there: so a stream that is resumed, at whichever gateway, goes on as it would have.
"""

from dataclasses import dataclass
from typing import Any, Final

from models.text.tool_call_parser import CallPiece, Said, ToolCallReader, call_id
from models.text.tool_calls import CallFormat

_STOP: Final = "stop"
_CALLED: Final = "tool_calls"


@dataclass(frozen=True, slots=True)
class Calls:
    """How calls are read in the answers to one question.

    Attributes:
        written: how the model writes them.
        functions: the names of those it was offered.
    """

    written: CallFormat
    functions: frozenset[str]

    def read(self, request_id: str, choice: int) -> "ChoiceCalls":
        """A reader of one choice's answer."""
        return ChoiceCalls(self, request_id, choice)


class ChoiceCalls:
    """One choice's text and calls."""

    def __init__(self, calls: Calls, request_id: str, choice: int) -> None:
        self._written = calls.written
        self._reader = ToolCallReader(calls.written, calls.functions)
        self._request_id = request_id
        self._choice = choice

    def push(self, text: str) -> dict[str, Any]:
        """The delta of a piece of text; empty where nothing is to be told yet."""
        return self._delta(self._reader.push(text))

    def end(self) -> dict[str, Any]:
        """The delta of what is left."""
        return self._delta(self._reader.end())

    def reason(self, finish_reason: str) -> str:
        """Why the choice ended."""
        return _CALLED if finish_reason == _STOP and self._reader.count else finish_reason

    def whole(self, text: str) -> dict[str, Any]:
        """The content of the message that is this text, and its calls, if it has some."""
        begun, rest = self._reader.push(text), self._reader.end()
        content = begun.content + rest.content
        for index, piece in rest.calls.items():
            known = begun.calls.setdefault(index, CallPiece())
            known.name, known.arguments = known.name or piece.name, known.arguments + piece.arguments
        if not begun.calls:
            return {"content": content}
        return {"content": content or None, "tool_calls": [self._call(*call) for call in begun.calls.items()]}

    def _delta(self, said: Said) -> dict[str, Any]:
        delta: dict[str, Any] = {"content": said.content} if said.content else {}
        if said.calls:
            delta["tool_calls"] = [{"index": call[0], **self._call(*call)} for call in said.calls.items()]
        return delta

    def _call(self, index: int, piece: CallPiece) -> dict[str, Any]:
        if piece.name is None:
            return {"function": {"arguments": piece.arguments}}
        return {
            "id": call_id(self._request_id, self._choice, index, self._written),
            "type": "function",
            "function": {"name": piece.name, "arguments": piece.arguments},
        }
