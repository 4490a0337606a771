"""The parts of a chat's answer as OpenAI's deltas: reasoning, text and tool calls.

Both readers are folds over the text, and the reasoning comes first: what it contains is no call.
"""

from dataclasses import dataclass
from typing import Any, Final

from gateway.openai.tool_calls import ChoiceReader, ToolCalling
from gateway.requests.service import Gateway
from models.text.harmony import HarmonyParser
from models.text.reasoning import BEGINS_INSIDE, Parted, ReasoningFormat
from models.text.reasoning_parser import ReasoningParser, parser_for
from models.text.tool_calls import offered
from shared.events import Inputs, OutputChunk


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerParts:
    """The parts that the answers to one request may have besides text.

    Attributes:
        tool_calling: the reader of tool calls; None for a request without tools.
        reasoning: the format of the reasoning; None if it stays in the text.
        shows_reasoning: the client gets the reasoning.
    """

    tool_calling: ToolCalling | None = None
    reasoning: ReasoningFormat | None = None
    shows_reasoning: bool = True

    @classmethod
    def of(
        cls, gateway: Gateway, inputs: Inputs, *, is_separate: bool = True, is_shown: bool = True
    ) -> "AnswerParts":
        """Those of an answer of the model that is served.

        `is_separate`: the reasoning is no part of the text. `is_shown`: the client gets it then.
        """
        calls = None
        if gateway.tool_calls is not None and offered(inputs) is not None:
            functions = [tool.function for tool in inputs.tools]
            schemas = {function.name: function.parameters or {} for function in functions}
            calls = ToolCalling(gateway.tool_calls, schemas)
        is_chat = inputs.messages is not None or inputs.chat
        reasoning = gateway.reasoning if is_chat and is_separate else None
        return cls(tool_calling=calls, reasoning=reasoning, shows_reasoning=is_shown)

    def reader(self, request_id: str, choice: int) -> "AnswerReader | None":
        """A reader for one choice; None if its text is all there is."""
        if self.tool_calling is None and self.reasoning is None:
            return None
        calls = None if self.tool_calling is None else self.tool_calling.reader(request_id, choice)
        return AnswerReader(calls, self.reasoning, shows_reasoning=self.shows_reasoning)


TEXT_ALONE: Final = AnswerParts()


class AnswerReader:
    """Reads the parts of one choice."""

    def __init__(
        self, calls: ChoiceReader | None, reasoning: ReasoningFormat | None, *, shows_reasoning: bool
    ) -> None:
        self._calls = calls
        self._format = reasoning
        self._shows_reasoning = shows_reasoning
        self._reasoning: ReasoningParser | HarmonyParser | None = None

    @property
    def held(self) -> int:
        """The number of the last characters that are not yet known to belong to a part."""
        reasoning = 0 if self._reasoning is None else self._reasoning.held
        return reasoning + (0 if self._calls is None else self._calls.held)

    def push(self, chunk: OutputChunk) -> dict[str, Any]:
        """The delta for the next chunk; empty if nothing is sent yet."""
        if self._format is None:
            return self._text(chunk.text)
        if self._reasoning is None:
            self._reasoning = parser_for(self._format, is_inside=bool(chunk.metadata.get(BEGINS_INSIDE)))
        return self._delta(self._reasoning.push(chunk.text))

    def end(self) -> dict[str, Any]:
        """The delta for the end of the text."""
        rest = Parted() if self._reasoning is None else self._reasoning.end()
        delta = self._thought(rest)
        if self._calls is not None:
            return delta | self._calls.end(rest.content)
        return delta | ({"content": rest.content} if rest.content else {})

    def reason(self, finish_reason: str) -> str:
        """The finish reason: `tool_calls` if the model stopped after a call."""
        return finish_reason if self._calls is None else self._calls.reason(finish_reason)

    def _delta(self, parted: Parted) -> dict[str, Any]:
        return self._thought(parted) | (self._text(parted.content) if parted.content else {})

    def _thought(self, parted: Parted) -> dict[str, Any]:
        is_shown = parted.reasoning and self._shows_reasoning
        return {"reasoning_content": parted.reasoning} if is_shown else {}

    def _text(self, text: str) -> dict[str, Any]:
        if self._calls is not None:
            return self._calls.push(text)
        return {"content": text} if text else {}


class WholeMessage:
    """The message of one choice: its deltas, joined."""

    def __init__(self, reader: AnswerReader | None) -> None:
        self._reader = reader
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: dict[int, dict[str, Any]] = {}

    def push(self, chunk: OutputChunk) -> None:
        """Read the next chunk."""
        if self._reader is None:
            self._texts.append(chunk.text)
        else:
            self._add(self._reader.push(chunk))

    def end(self, finish_reason: str) -> str:
        """End the message; return its finish reason."""
        if self._reader is None:
            return finish_reason
        self._add(self._reader.end())
        return self._reader.reason(finish_reason)

    def content(self) -> dict[str, Any]:
        """`content`, and where there are some `reasoning_content` and `tool_calls`."""
        text, thought = "".join(self._texts), "".join(self._thoughts)
        found: dict[str, Any] = {"content": (text or None) if self._calls else text}
        if thought:
            found["reasoning_content"] = thought
        if self._calls:
            found["tool_calls"] = list(self._calls.values())
        return found

    def _add(self, delta: dict[str, Any]) -> None:
        self._texts.append(delta.get("content", ""))
        self._thoughts.append(delta.get("reasoning_content", ""))
        for piece in delta.get("tool_calls", ()):
            known = self._calls.get(piece["index"])
            if known is None:
                call = {name: value for name, value in piece.items() if name != "index"}
                self._calls[piece["index"]] = call | {"function": dict(piece["function"])}
            else:
                known["function"]["arguments"] += piece["function"]["arguments"]
