"""Responses as OpenAI shows them: events with numbers, or one document. Both are one fold over the chunks.

    response.created, response.in_progress           in the background response.queued between them
    response.output_item.added                       a message, reasoning, or a function call
      response.content_part.added                    of messages and reasoning
        response.output_text.delta ... .done         or reasoning_text, or function_call_arguments
      response.content_part.done
    response.output_item.done
    response.completed                               or response.incomplete, response.failed

The events of a recorded request are always the same, so a client may ask for those behind a number again, of
any gateway.
"""

import time
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from gateway.errors import HttpError
from gateway.http.lines import server_sent_event
from gateway.openai.answer_reader import TEXT_ALONE, AnswerParts
from gateway.openai.content_tokens import ContentTokens
from gateway.openai.logprobs import ListedToken, token_objects
from gateway.requests.parsed_request import ParsedRequest
from gateway.requests.relay import REQUEST_CANCELLED
from gateway.requests.response import DocumentFormat
from gateway.requests.service import Gateway
from gateway.requests.usage import input_output_usage
from gateway.responses.items import call_item, reasoning_item
from shared.events import (
    Failure,
    Function,
    Inputs,
    NamedTool,
    OutputChunk,
    Params,
    RequestSubmitted,
    Usage,
)

_CHOICE: Final = 0
_INCOMPLETE: Final = {"length": "max_output_tokens", "content_filter": "content_filter"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseHead:
    """The fields of a request that its response object repeats."""

    request_id: str
    model: str
    created_s: int
    inputs: Inputs
    params: Params
    api_fields: dict[str, Any]
    parts: AnswerParts = TEXT_ALONE

    @classmethod
    def of(
        cls,
        gateway: Gateway,
        request_id: str,
        created_s: int,
        asked: ParsedRequest | RequestSubmitted,
    ) -> "ResponseHead":
        """That of a request as it is submitted, or as the log has it."""
        return cls(
            request_id=request_id,
            model=asked.model,
            created_s=created_s,
            inputs=asked.inputs,
            params=asked.params,
            api_fields=asked.api_fields,
            parts=AnswerParts.of(gateway, asked.inputs),
        )

    def document(
        self,
        status: str,
        output: list[dict[str, Any]] | None = None,
        *,
        usage: Usage | None = None,
        reason: str | None = None,
        error: dict[str, Any] | None = None,
        completed_s: int | None = None,
    ) -> dict[str, Any]:
        """The response object; `reason` says why it is incomplete."""
        fields, params, inputs = self.api_fields, self.params, self.inputs
        instructions = (
            inputs.messages[0]["content"] if fields.get("has_instructions") and inputs.messages else None
        )
        document = {
            "id": self.request_id,
            "object": "response",
            "created_at": self.created_s,
            "completed_at": completed_s,
            "status": status,
            "background": bool(fields.get("background")),
            "error": error,
            "incomplete_details": None if reason is None else {"reason": reason},
            "instructions": instructions,
            "max_output_tokens": params.max_tokens,
            "max_tool_calls": None,
            "metadata": fields.get("metadata", {}),
            "model": self.model,
            "output": output or [],
            "parallel_tool_calls": inputs.parallel_tool_calls,
            "previous_response_id": fields.get("previous_response_id"),
            "reasoning": {"effort": fields.get("effort"), "summary": None},
            "service_tier": "default",
            "store": bool(fields.get("store")),
            "temperature": params.temperature,
            "text": {"format": fields.get("format") or {"type": "text"}, "verbosity": "medium"},
            "tool_choice": _choice(inputs),
            "tools": [_tool(tool.function) for tool in inputs.tools],
            "top_logprobs": params.logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
        }
        if conversation := fields.get("conversation"):
            document["conversation"] = {"id": conversation}
        return document if usage is None else document | {"usage": usage_of(usage)}


def _tool(function: Function) -> dict[str, Any]:
    return {
        "type": "function", "name": function.name, "description": function.description,
        "parameters": function.parameters, "strict": bool(function.strict),
    }  # fmt: skip


def _choice(inputs: Inputs) -> Any:
    choice = inputs.tool_choice
    if isinstance(choice, NamedTool):
        return {"type": "function", "name": choice.function.name}
    return choice


def usage_of(usage: Usage) -> dict[str, Any]:
    """Usage under the names of this route."""
    found = input_output_usage(usage)
    found["input_tokens_details"]["cache_write_tokens"] = 0
    return found


def failed_document(head: ResponseHead, failure: Failure | HttpError) -> dict[str, Any]:
    """The object of a response that failed, or that its client cancelled."""
    if failure.code == REQUEST_CANCELLED:
        return head.document("cancelled")
    return head.document("failed", error=_error(failure.code, failure.message))


def _error(code: str, message: str) -> dict[str, Any]:
    return {"code": "rate_limit_exceeded" if code == "rate_limited" else "server_error", "message": message}


@dataclass(slots=True)
class _Open:
    """The item that is being written."""

    index: int
    item: dict[str, Any]
    texts: list[str] = field(default_factory=list)
    tokens: list[dict[str, Any]] = field(default_factory=list)

    @property
    def place(self) -> dict[str, Any]:
        return {"item_id": self.item["id"], "output_index": self.index}

    @property
    def text(self) -> str:
        return "".join(self.texts)


class ResponseBuilder:
    """The response so far: `begin`, a `push` for each chunk, `end`. Each returns the new events."""

    def __init__(self, head: ResponseHead) -> None:
        self._head = head
        self._reader = head.parts.reader(head.request_id, _CHOICE)
        self._tokens = None
        if head.params.logprobs is not None:
            self._tokens = ContentTokens(head.parts.reader(head.request_id, _CHOICE))
        self._events: list[dict[str, Any]] = []
        self._count = 0
        self._output: list[dict[str, Any]] = []
        self._open: _Open | None = None
        self._finish_reason = "stop"

    def begin(self) -> list[dict[str, Any]]:
        """The events before the first chunk."""
        running = self._head.document("in_progress")
        if self._head.api_fields.get("background"):
            queued = self._head.document("queued")
            self._event("response.created", response=queued)
            self._event("response.queued", response=queued)
        else:
            self._event("response.created", response=running)
        self._event("response.in_progress", response=running)
        return self._take()

    def push(self, chunk: OutputChunk) -> list[dict[str, Any]]:
        """The events for a chunk."""
        listed = [] if self._tokens is None else self._tokens.push(chunk)
        self._add({"content": chunk.text} if self._reader is None else self._reader.push(chunk), listed)
        return self._take()

    def end(self, finish_reason: str) -> list[dict[str, Any]]:
        """The events for the end of the text."""
        listed = [] if self._tokens is None else self._tokens.end(finish_reason)
        self._add({} if self._reader is None else self._reader.end(), listed)
        self._finish_reason = finish_reason
        is_cut = finish_reason in _INCOMPLETE
        if self._open is None and not self._output:
            self._begin_text("message")  # clients read the first item, also of an answer without text
        self._close("incomplete" if is_cut else "completed")
        return self._take()

    def complete(self, usage: Usage, completed_s: int | None = None) -> list[dict[str, Any]]:
        """The last event."""
        document = self.document(usage, completed_s)
        self._event(f"response.{document['status']}", response=document)
        return self._take()

    def failed(self, error: HttpError) -> list[dict[str, Any]]:
        """The last event of a response that failed."""
        self._event("response.failed", response=failed_document(self._head, error))
        return self._take()

    def document(self, usage: Usage, completed_s: int | None = None) -> dict[str, Any]:
        """The whole response."""
        reason = _INCOMPLETE.get(self._finish_reason)
        return self._head.document(
            "completed" if reason is None else "incomplete",
            self._output,
            usage=usage,
            reason=reason,
            completed_s=completed_s if reason is None else None,
        )

    # ---- events ------------------------------------------------------------------------------------------
    def _take(self) -> list[dict[str, Any]]:
        found, self._events = self._events, []
        return found

    def _event(self, kind: str, **fields: Any) -> None:
        self._events.append({"type": kind, "sequence_number": self._count, **fields})
        self._count += 1

    def _add(self, delta: dict[str, Any], listed: list[ListedToken]) -> None:
        """Add a delta; `listed` are the tokens of its content."""
        if thought := delta.get("reasoning_content"):
            self._text("reasoning", thought, [])
        if text := delta.get("content"):
            self._text("message", text, token_objects(listed))
        elif self._open is not None and self._open.item["type"] == "message":
            self._open.tokens += token_objects(listed)  # those of a character that the limit cut off
        for call in delta.get("tool_calls", ()):
            function = call["function"]
            if "id" in call:
                self._close()
                item = call_item(self._id("fc"), call["id"], function["name"], "", status="in_progress")
                self._begin(item)
            assert self._open is not None, "a call begins with its id"
            if arguments := function.get("arguments"):
                self._open.texts.append(arguments)
                self._event("response.function_call_arguments.delta", **self._open.place, delta=arguments)

    def _text(self, kind: str, text: str, tokens: list[dict[str, Any]]) -> None:
        if self._open is None or self._open.item["type"] != kind:
            self._close()
            self._begin_text(kind)
        assert self._open is not None
        self._open.texts.append(text)
        self._open.tokens += tokens
        if kind == "reasoning":
            self._event("response.reasoning_text.delta", **self._open.place, content_index=0, delta=text)
        else:
            self._event(
                "response.output_text.delta",
                **self._open.place,
                content_index=0,
                delta=text,
                logprobs=tokens,
            )

    def _begin_text(self, kind: str) -> None:
        if kind == "reasoning":
            item = reasoning_item(self._id("rs"), "", status="in_progress")
        else:
            item = {
                "type": "message", "id": self._id("msg"), "role": "assistant", "status": "in_progress",
                "content": [],
            }  # fmt: skip
        opened = self._begin(item)
        part = _part(kind, "", [])
        self._event("response.content_part.added", **opened.place, content_index=0, part=part)

    def _begin(self, item: dict[str, Any]) -> _Open:
        self._open = _Open(len(self._output), item)
        self._event("response.output_item.added", output_index=self._open.index, item=item)
        return self._open

    def _close(self, status: str = "completed") -> None:
        """End the open item, if there is one."""
        opened, self._open = self._open, None
        if opened is None:
            return
        text, kind = opened.text, opened.item["type"]
        if kind == "function_call":
            item = {**opened.item, "arguments": text, "status": status}
            self._event(
                "response.function_call_arguments.done",
                **opened.place,
                name=item["name"],
                arguments=text,
            )
        else:
            part = _part(kind, text, opened.tokens)
            item = {**opened.item, "content": [part], "status": status}
            if kind == "reasoning":
                self._event("response.reasoning_text.done", **opened.place, content_index=0, text=text)
            else:
                self._event(
                    "response.output_text.done",
                    **opened.place,
                    content_index=0,
                    text=text,
                    logprobs=opened.tokens,
                )
            self._event("response.content_part.done", **opened.place, content_index=0, part=part)
        self._output.append(item)
        self._event("response.output_item.done", output_index=opened.index, item=item)

    def _id(self, prefix: str) -> str:
        return f"{prefix}-{self._head.request_id}-{len(self._output)}"


def response_of(item_id: str) -> str:
    """The id of the response whose output has an item with this id."""
    return item_id.partition("-")[2].rpartition("-")[0]


def _part(kind: str, text: str, tokens: list[dict[str, Any]]) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": tokens}


# ---- formats -----------------------------------------------------------------------------------------


class ResponseStream:
    """A response as events; those up to the number `after` are left out.

    `completed_s` is when it ended, in seconds since 1970; None is when the events do.
    """

    media_type = "text/event-stream; charset=utf-8"

    def __init__(self, head: ResponseHead, after: int = -1, completed_s: int | None = None) -> None:
        self._builder = ResponseBuilder(head)
        self._completed_s = completed_s
        self._after = after
        self._has_begun = False

    def chunk(self, choice: int, chunk: OutputChunk) -> bytes:
        return self._begin() + self._sent(self._builder.push(chunk))

    def ended(self, choice: int, finish_reason: str) -> bytes:
        return self._begin() + self._sent(self._builder.end(finish_reason))

    def complete(self, usage: Usage) -> bytes:
        return self._sent(self._builder.complete(usage, self._completed_s or int(time.time())))

    def failed(self, error: HttpError) -> bytes:
        return self._begin() + self._sent(self._builder.failed(error))

    def _begin(self) -> bytes:
        if self._has_begun:
            return b""
        self._has_begun = True
        return self._sent(self._builder.begin())

    def _sent(self, events: list[dict[str, Any]]) -> bytes:
        return b"".join(
            b"event: %s\n" % event["type"].encode() + server_sent_event(event)
            for event in events
            if event["sequence_number"] > self._after
        )


class ResponseDocument(DocumentFormat):
    """A response as one JSON document."""

    def __init__(self, head: ResponseHead) -> None:
        self._builder = ResponseBuilder(head)

    def chunk(self, choice: int, chunk: OutputChunk) -> bytes:
        self._builder.push(chunk)
        return b""

    def ended(self, choice: int, finish_reason: str) -> bytes:
        self._builder.end(finish_reason)
        return b""

    def complete(self, usage: Usage) -> bytes:
        return msgspec.json.encode(self._builder.document(usage, int(time.time())))
