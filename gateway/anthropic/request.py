"""Parsing of Anthropic's requests: the fields of a chat of OpenAI's, and errors in the words of the body."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from gateway.anthropic.content import Chat, chat_of
from gateway.errors import InvalidParamError, NotSupportedError
from gateway.http.bodies import check_names, converted
from gateway.openai.body_words import BodyWords
from gateway.openai.known_fields import check_fields
from gateway.requests.parsed_request import DeliveryFields

NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    "container": (),
    "context_management": (),
    "inference_geo": (),
    "mcp_servers": ([],),
    "diagnostics": (),
    "service_tier": ("auto", "standard_only"),
    "speed": ("standard",),
}
"""Fields that are not supported: the values that change nothing. Null is absent."""
_ABOUT_THE_CLIENT: Final = frozenset({"metadata", "cache_control", "user_profile_id"})
"""Accepted with any value: they describe the client, or are hints that change no answer."""
_TOOL: Final = (
    "name",
    "description",
    "input_schema",
    "type",
    "strict",
    "cache_control",
    "eager_input_streaming",
)
_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool that the client has; `input_schema` is the JSON schema of an object."""

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None
    type: Literal["custom"] | None = None


class ToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    """How the model is to use tools; `name` is that of one of them, for the type `tool`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Schema(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The JSON schema that the answer has to match."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The form of the answer, and how much a model is to think before it."""

    format: Schema | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class Thinking(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The wish that a model thinks, or does not; with `adaptive` it does as its chat template has it."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, Meta(ge=1)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class CountRequest(DeliveryFields, frozen=True, kw_only=True):
    """`POST /v1/messages/count_tokens`: what a chat's prompt depends on."""

    model: Annotated[str, Meta(max_length=256)]
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    system: str | list[dict[str, Any]] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    output_config: OutputConfig | None = None
    thinking: Thinking | None = None


class MessagesRequest(CountRequest, frozen=True, kw_only=True):
    """`POST /v1/messages`. `request_id`, `timeout_s`, `linger_s` and `priority` are ours."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None


@dataclass(frozen=True, slots=True)
class AsChat:
    """A request in OpenAI's form.

    Attributes:
        fields: the body of `POST /v1/chat/completions` that asks the same.
        words: the names of these fields in Anthropic's body.
        stops: the client's stop sequences.
        shows_thoughts: the client gets what the model thinks.
    """

    fields: dict[str, Any]
    words: BodyWords
    stops: frozenset[str]
    shows_thoughts: bool = True


_NAMES: Final = (
    (re.compile(r"^enable_thinking\b"), "thinking"),
    (re.compile(r"^thinking_budget\b"), "thinking.budget_tokens"),
    (re.compile(r"^reasoning_effort\b"), "output_config.effort"),
    (re.compile(r"^stop\b"), "stop_sequences"),
    (re.compile(r"^(response_format|guide)\.json_schema(\.schema)?"), "output_config.format.schema"),
    (re.compile(r"^(tools\[\d+\])\.function\.parameters\b"), r"\1.input_schema"),
    (re.compile(r"^(tools\[\d+\])\.function\b"), r"\1"),
)


def parse(body: dict[str, Any]) -> AsChat:
    """Parse a body.

    Raises:
        InvalidParamError: a field is of the wrong type, missing, or not supported.
    """
    check_fields(body, MessagesRequest.__struct_fields__, NEUTRAL, ignored=_ABOUT_THE_CLIENT, instead={})
    _check_tools(body.get("tools"))
    asked = converted(body, MessagesRequest)
    chat = chat_of(asked.system, asked.messages)
    choice = asked.tool_choice
    form = asked.output_config.format if asked.output_config is not None else None
    effort = asked.output_config.effort if asked.output_config is not None else None
    fields: dict[str, Any] = {
        "model": asked.model,
        "messages": chat.messages,
        "continue_final_message": _is_begun(chat) or None,
        "max_tokens": asked.max_tokens,
        "stop": asked.stop_sequences or None,
        "stream": asked.stream,
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "top_k": asked.top_k,
        "tools": [_tool(one) for one in asked.tools] if asked.tools else None,
        "tool_choice": None if choice is None else _choice(choice),
        "parallel_tool_calls": False if choice is not None and choice.disable_parallel_tool_use else None,
        "guide": None if form is None else {"json_schema": form.schema},
        "reasoning_effort": "xhigh" if effort == "max" else effort,
        **_thinking(asked.thinking),
        "request_id": asked.request_id,
        "timeout_s": asked.timeout_s,
        "linger_s": asked.linger_s,
        "priority": asked.priority,
    }
    given = {name: value for name, value in fields.items() if value is not None}
    is_omitted = asked.thinking is not None and asked.thinking.display == "omitted"
    return AsChat(
        given,
        BodyWords(_NAMES, chat.places),
        frozenset(asked.stop_sequences or ()),
        shows_thoughts=not is_omitted,
    )


def _is_begun(chat: Chat) -> bool:
    """True if the last message is the beginning of the answer.

    Raises:
        InvalidParamError: it has no text, or calls a tool.
    """
    last = chat.messages[-1]
    if last.get("role") != "assistant":
        return False
    if last.get("tool_calls") or not last.get("content"):
        found = "a tool_use" if last.get("tool_calls") else "none"
        raise InvalidParamError(
            f"{chat.places[-1]}.content",
            f"{chat.places[-1]}.content: expected a text in the assistant's last message, which the answer "
            f"continues; found {found}",
        )
    return True


def parse_count(body: dict[str, Any]) -> AsChat:
    """Parse the body of a request to count tokens.

    Raises:
        InvalidParamError: a field is of the wrong type, missing, or not supported.
    """
    check_fields(body, CountRequest.__struct_fields__, NEUTRAL, ignored=_ABOUT_THE_CLIENT, instead={})
    converted(body, CountRequest)
    return parse({**body, "max_tokens": 1})


def _check_tools(tools: object) -> None:
    """Refuse tools that Anthropic's servers run, and fields that are not known."""
    for number, tool in enumerate(tools if isinstance(tools, list) else []):
        if not isinstance(tool, dict):
            continue  # refused by its type
        kind = tool.get("type")
        if kind not in (None, "custom"):
            raise NotSupportedError(
                f"tools[{number}].type", kind, '"custom": only tools of the client are known'
            )
        check_names(f"tools[{number}]", tool, _TOOL)


def _tool(tool: Tool) -> dict[str, Any]:
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema,
        "strict": tool.strict,
    }
    return {"type": "function", "function": {k: v for k, v in function.items() if v is not None}}


def _thinking(thinking: Thinking | None) -> dict[str, Any]:
    if thinking is None:
        return {}
    if thinking.type != "enabled" and thinking.budget_tokens is not None:
        raise InvalidParamError(
            "thinking.budget_tokens", "thinking.budget_tokens: expected none unless thinking is enabled"
        )
    return {
        "enable_thinking": {"enabled": True, "disabled": False}.get(thinking.type),
        "thinking_budget": thinking.budget_tokens,
    }


def _choice(choice: ToolChoice) -> Any:
    if choice.type != "tool":
        return _CHOICES[choice.type]
    if choice.name is None:
        raise InvalidParamError(
            "tool_choice.name", "tool_choice.name: expected the name of a tool, found none"
        )
    return {"type": "function", "function": {"name": choice.name}}
