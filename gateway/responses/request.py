"""Parsing of requests for responses: the chat that asks the same, and what the response object repeats."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from gateway.errors import InvalidParamError, NotSupportedError
from gateway.http.bodies import Metadata, check_names, converted
from gateway.openai.body_words import BodyWords
from gateway.openai.known_fields import check_fields
from gateway.requests.parsed_request import DeliveryFields
from gateway.responses.items import Chat, add_items

NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    "prompt": (),
    "context_management": ([],),
    "max_tool_calls": (),
    "truncation": ("disabled",),
    "service_tier": ("auto", "default"),
    "stream_options": ({}, {"include_obfuscation": False}),
    "moderation": (),
}
"""Fields that are not supported: the values that change nothing. Null is absent."""
_ABOUT_THE_CLIENT: Final = frozenset(
    {"user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"}
)
_LOGPROBS: Final = "message.output_text.logprobs"
_INCLUDED: Final = (_LOGPROBS, "reasoning.encrypted_content")
"""The values of `include`. The reasoning is in the response as it is, so including it changes nothing."""
_OF_CHATS: Final = (
    "temperature", "top_p", "parallel_tool_calls", "seed", "stop", "top_k", "min_p", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "logit_bias", "min_tokens", "stop_token_ids", "ignore_eos",
    "allowed_token_ids", "truncate_prompt_tokens", "truncation_side", "cache_salt",
    "chat_template_kwargs", "enable_thinking", "thinking_budget", "guide", "options",
    "request_id", "timeout_s", "linger_s", "priority",
)  # fmt: skip
"""Fields that a chat has under the same name."""
API: Final = "responses"
"""The value of `api` in the `api_fields` of a response."""


class Format(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class Text(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The form of the answer, and its length, which is not chosen here."""

    format: Format | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The effort of thinking. Summaries are not made: the reasoning itself is in the response."""

    effort: str | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None


class Conversation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A conversation by its id."""

    id: str


class ResponsesRequest(DeliveryFields, frozen=True, kw_only=True):
    """`POST /v1/responses`. The fields of sampling beyond `temperature` and `top_p` are ours."""

    model: Annotated[str, Meta(max_length=256)] | None = None
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: str | Conversation | None = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    max_output_tokens: int | None = None
    metadata: Metadata | None = None
    text: Text | None = None
    reasoning: Reasoning | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    parallel_tool_calls: bool | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, Any] | None = None
    min_tokens: int | None = None
    stop_token_ids: list[Any] | None = None
    allowed_token_ids: list[Any] | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    cache_salt: str | None = None
    ignore_eos: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    thinking_budget: int | None = None
    guide: dict[str, Any] | None = None
    options: dict[str, Any] | None = None

    @property
    def has_logprobs(self) -> bool:
        """The tokens of the answer are listed with their log probabilities."""
        return _LOGPROBS in (self.include or ())

    @property
    def conversation_id(self) -> str | None:
        """The id of the conversation that the response continues."""
        return self.conversation.id if isinstance(self.conversation, Conversation) else self.conversation


@dataclass(frozen=True, slots=True, kw_only=True)
class AsChat:
    """A request in the form of OpenAI's older route.

    Attributes:
        asked: the request.
        fields: the body of `POST /v1/chat/completions` that asks the same, with the messages of `chat`.
        chat: the chat, with the places of its messages in the body.
        is_kept: the response can be read again.
    """

    asked: ResponsesRequest
    fields: dict[str, Any]
    chat: Chat

    @property
    def is_kept(self) -> bool:
        return self.asked.store is not False

    def api_fields(self) -> dict[str, Any]:
        """The fields of the response object that the request on the log would not tell."""
        asked = self.asked
        found: dict[str, Any] = {
            "api": API,
            "store": self.is_kept,
            "background": bool(asked.background),
            "has_instructions": asked.instructions is not None,
            "previous_response_id": asked.previous_response_id,
            "conversation": asked.conversation_id,
            "metadata": asked.metadata or {},
            "format": None
            if asked.text is None or asked.text.format is None
            else msgspec.to_builtins(asked.text.format),
            "effort": None if asked.reasoning is None else asked.reasoning.effort,
        }
        return {name: value for name, value in found.items() if value not in (None, {}, False)}

    @property
    def words(self) -> BodyWords:
        """The names of `fields` in the body."""
        return BodyWords(_NAMES, self.chat.places)


_NAMES: Final = (
    (re.compile(r"^(max_tokens|max_completion_tokens)\b"), "max_output_tokens"),
    (re.compile(r"^response_format\.json_schema"), "text.format"),
    (re.compile(r"^response_format"), "text.format"),
    (re.compile(r"^reasoning_effort\b"), "reasoning.effort"),
    (re.compile(r"^(tools\[\d+\])\.function\b"), r"\1"),
    (re.compile(r"^tool_choice\.function\b"), "tool_choice"),
)


def parse(body: dict[str, Any], model: str) -> ResponsesRequest:
    """Parse a body; `model` is that of a body without one.

    Raises:
        InvalidParamError: a field is of the wrong type, or not supported.
    """
    check_fields(body, ResponsesRequest.__struct_fields__, NEUTRAL, ignored=_ABOUT_THE_CLIENT, instead={})
    asked = converted({"model": model, **{k: v for k, v in body.items() if v is not None}}, ResponsesRequest)
    for number, name in enumerate(asked.include or ()):
        if name not in _INCLUDED:
            raise NotSupportedError(f"include[{number}]", name, " or ".join(_INCLUDED))
    if asked.top_logprobs and not asked.has_logprobs:
        raise InvalidParamError(
            "top_logprobs", f"top_logprobs: expected none, or 0, unless include has {_LOGPROBS!r}"
        )
    if asked.background and asked.store is False:
        raise InvalidParamError("store", "store: expected true, or none, for a response in the background")
    if asked.conversation_id is not None and asked.store is False:
        raise InvalidParamError("store", "store: expected true, or none, for a response of a conversation")
    if asked.conversation_id is not None and asked.previous_response_id is not None:
        raise InvalidParamError(
            "previous_response_id", "previous_response_id: expected none with a conversation, found both"
        )
    return asked


def as_chat(asked: ResponsesRequest, earlier: list[dict[str, Any]]) -> AsChat:
    """The chat of a request, behind the `earlier` messages of the response or conversation it continues.

    Raises:
        InvalidParamError: an item or a tool is malformed, or not supported.
    """
    chat = Chat()
    if asked.instructions is not None:
        chat.add("instructions", {"role": "system", "content": asked.instructions})
    for message in earlier:
        chat.add("conversation" if asked.conversation is not None else "previous_response_id", message)
    if asked.input is not None:
        add_items(chat, asked.input)
    elif not earlier:
        raise InvalidParamError(
            "input",
            "input: expected a string or an array of items, found nothing",
            code="missing_required_parameter",
        )
    fields: dict[str, Any] = {name: getattr(asked, name) for name in _OF_CHATS}
    fields |= {
        "model": asked.model,
        "stream": asked.stream,
        "max_completion_tokens": asked.max_output_tokens,
        "logprobs": asked.has_logprobs or None,
        "top_logprobs": asked.top_logprobs if asked.has_logprobs else None,
        "reasoning_effort": None if asked.reasoning is None else asked.reasoning.effort,
        "response_format": _response_format(asked.text),
        "tools": [_tool(n, one) for n, one in enumerate(asked.tools)] if asked.tools else None,
        "tool_choice": _tool_choice(asked.tool_choice),
    }
    given = {name: value for name, value in fields.items() if value is not None}
    return AsChat(asked=asked, fields=given, chat=chat)


def _response_format(text: Text | None) -> dict[str, Any] | None:
    if text is None or text.format is None or text.format.type == "text":
        return None
    if text.format.type == "json_object":
        return {"type": "json_object"}
    schema: dict[str, Any] = msgspec.to_builtins(text.format)
    del schema["type"]
    return {"type": "json_schema", "json_schema": schema}


_TOOL: Final = ("type", "name", "description", "parameters", "strict", "defer_loading")


def _tool(number: int, tool: Mapping[str, Any]) -> dict[str, Any]:
    where = f"tools[{number}]"
    if tool.get("type") != "function":
        raise NotSupportedError(
            f"{where}.type", tool.get("type"), '"function": only tools of the client are known'
        )
    check_names(where, tool, _TOOL)
    function = {
        name: tool[name]
        for name in ("name", "description", "parameters", "strict")
        if tool.get(name) is not None
    }
    return {"type": "function", "function": function}


def _tool_choice(choice: str | dict[str, Any] | None) -> Any:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") != "function":
        raise NotSupportedError("tool_choice.type", choice.get("type"), '"function"')
    return {"type": "function", "function": {"name": choice.get("name")}}
