"""Parsing of OpenAI's chat and completion requests into inputs and parameters.

Unknown fields, and fields that would change the answer and are not supported, are refused by name
(`gateway.openai.known_fields`): an answer that ignores them would be silently wrong. `shared.events.Params`
checks the ranges of parameters, for HTTP and NATS alike, and `gateway.request_limits` the limits of this
gateway.
"""

from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar

import msgspec
from msgspec import Meta

from configs.deployment import GatewaySettings
from gateway import request_limits
from gateway.errors import InvalidParamError, NotSupportedError
from gateway.http.bodies import converted, params_of
from gateway.media.parts import PART_TYPES, is_placed
from gateway.openai.guide_fields import with_guide
from gateway.openai.known_fields import (
    CHAT_NEUTRAL,
    COMPLETION_NEUTRAL,
    check_chat_fields,
    check_fields,
    check_stream_options,
)
from gateway.openai.prompts import prompt_inputs, prompt_list
from gateway.openai.sound import SoundFields
from gateway.openai.token_ids import StreamUsage
from gateway.requests.parsed_request import ModelRequest
from models import options
from models.options import Options
from shared.events import MAX_LOGPROBS, MAX_TOOLS, Effort, Inputs, NamedTool, Params, Tool
from shared.validation_errors import described

_TEMPLATE_OPTIONS: Final = "chat_template_kwargs"
SCHEMA_FIELD: Final = "response_format.json_schema.schema"
ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function")


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Further contents of a stream. `continuous_usage_stats` is vLLM's."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class TextFormat(msgspec.Struct, frozen=True, tag_field="type", tag="text", forbid_unknown_fields=True):
    """Any text."""

    guide: ClassVar[dict[str, Any] | None] = None


class JsonObjectFormat(
    msgspec.Struct, frozen=True, tag_field="type", tag="json_object", forbid_unknown_fields=True
):
    """Any JSON object."""

    guide: ClassVar[dict[str, Any] | None] = {"json_object": True}


class NamedSchema(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A JSON schema. Answers always match it, `strict` or not; without `schema` they are any JSON object."""

    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class JsonSchemaFormat(
    msgspec.Struct, frozen=True, tag_field="type", tag="json_schema", forbid_unknown_fields=True
):
    """JSON that matches a schema."""

    json_schema: NamedSchema

    @property
    def guide(self) -> dict[str, Any]:
        schema = self.json_schema.schema
        return {"json_object": True} if schema is None else {"json_schema": schema}


class _Request(ModelRequest, frozen=True, kw_only=True):
    """The fields that both routes have in common.

    `guide`, `top_k`, `min_p`, `repetition_penalty`, `bad_words`, `allowed_token_ids`, `min_tokens`,
    `stop_token_ids`, `ignore_eos`, `truncate_prompt_tokens`, `truncation_side`, `cache_salt`,
    `return_token_ids`, `return_tokens_as_token_ids` and `options` are not OpenAI's; each of the model's
    options may also be a field of its own.
    `neutral` maps each unsupported field to the values that it may have.
    """

    neutral: ClassVar[Mapping[str, tuple[object, ...]]]

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1)] | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, Any] | None = None
    bad_words: list[Any] | None = None
    allowed_token_ids: list[Any] | None = None
    min_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Any] | None = None
    ignore_eos: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    response_format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None = None
    guide: dict[str, Any] | None = None
    options: dict[str, Any] | None = None

    @property
    def limit_tokens(self) -> tuple[str, int | None]:
        """The name of the field with the limit of the answer, and its value."""
        return "max_tokens", self.max_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        """The number of the likeliest tokens to list in each place; None for no log probabilities."""
        raise NotImplementedError

    @property
    def wanted_guide(self) -> dict[str, Any] | None:
        """The guide of the answer, as in `Params`."""
        format_guide = None if self.response_format is None else self.response_format.guide
        if format_guide is not None and self.guide is not None:
            raise InvalidParamError("guide", "guide: expected none together with response_format, found one")
        return self.guide if format_guide is None else format_guide

    @property
    def outputs(self) -> list[str]:
        """The output modalities of the answer."""
        return ["text"]

    @property
    def sound(self) -> SoundFields | None:
        """The form of the sound of the answer."""
        return None

    @property
    def answers(self) -> int:
        """The number of answers to each prompt."""
        return 1 if self.n is None else self.n

    @property
    def stream_usage(self) -> StreamUsage:
        """The events of the stream that have a usage. vLLM's option adds nothing without OpenAI's."""
        asked = self.stream_options
        if not self.stream or asked is None or not asked.include_usage:
            return StreamUsage.NONE
        return StreamUsage.ALL if asked.continuous_usage_stats else StreamUsage.LAST

    @property
    def shows_prompt(self) -> bool:
        """The answer begins with the prompt's text."""
        return False

    @property
    def wanted_echo(self) -> bool | Literal["ids"]:
        """The echo of the prompt on the log."""
        if self.shows_prompt:
            return True
        return "ids" if self.return_token_ids or self.stream_usage is StreamUsage.ALL else False

    def prompts(self, settings: GatewaySettings) -> list[Inputs]:
        """The prompts.

        Raises:
            ClientError: a prompt is wrong, or there are too many.
        """
        raise NotImplementedError

    def params(self, settings: GatewaySettings) -> Params:
        """The parameters of the request's event.

        Raises:
            InvalidParamError: a value is out of its range, or more than allowed.
        """
        self.check_delivery()
        limit_name, limit = self.limit_tokens
        logprobs, guide = self.wanted_logprobs, self.wanted_guide
        client_names = {"max_tokens": limit_name}
        if self.guide is None:
            client_names["guide.json_schema"] = SCHEMA_FIELD
        try:
            params = params_of(
                self,
                max_tokens=limit,
                stop=[self.stop] if isinstance(self.stop, str) else self.stop,
                logprobs=logprobs,
                guide=guide,
                echo=self.wanted_echo,
            )
        except InvalidParamError as error:
            name = error.param or ""
            if name not in client_names:
                raise
            client_name = client_names[name]
            raise InvalidParamError(client_name, error.message.replace(name, client_name, 1)) from error
        request_limits.check_params(params, settings, limit_name)
        return params


class _CalledFunction(msgspec.Struct, frozen=True, kw_only=True):
    """A function's name, and its arguments as the model wrote them: maybe no JSON."""

    name: str
    arguments: str


class _ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call in an assistant's message."""

    id: str
    type: Literal["function"]
    function: _CalledFunction


class ChatRequest(_Request, frozen=True, kw_only=True):
    """`POST /v1/chat/completions`.

    Of the reasoning: `chat_template_kwargs` and `include_reasoning` are vLLM's, `separate_reasoning` is
    SGLang's, `enable_thinking` and `thinking_budget` are Qwen's.
    """

    neutral = CHAT_NEUTRAL

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    reasoning_effort: Effort | None = None
    thinking_budget: int | None = None
    separate_reasoning: bool | None = None
    include_reasoning: bool | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    modalities: Annotated[list[str], Meta(min_length=1)] | None = None
    audio: SoundFields | None = None

    @property
    def outputs(self) -> list[str]:
        return ["text"] if self.modalities is None else self.modalities

    @property
    def sound(self) -> SoundFields | None:
        return self.audio

    @property
    def limit_tokens(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        if self.logprobs:
            return self.top_logprobs or 0
        if self.top_logprobs is not None:
            raise InvalidParamError("top_logprobs", "top_logprobs: expected none while logprobs is not true")
        return None

    def prompts(self, settings: GatewaySettings) -> list[Inputs]:
        request_limits.check_messages(len(self.messages), settings)
        request_limits.check_choices(1, self.answers, settings)
        return [self.inputs()]

    def inputs(self) -> Inputs:
        """The chat.

        Raises:
            ClientError: a message is malformed or not text, or its tools are inconsistent.
        """
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidParamError(
                "add_generation_prompt",
                "add_generation_prompt: expected false, or none, with continue_final_message",
            )
        calls: set[str] = set()
        for number, message in enumerate(self.messages):
            _check_message(f"messages[{number}]", message, calls)
        try:
            return Inputs(
                messages=[_with_thoughts(message) for message in self.messages],
                output_modalities=self.outputs,
                tools=self.tools or [],
                tool_choice=self.tool_choice or "auto",
                parallel_tool_calls=self.parallel_tool_calls is not False,
                template_options=self._template_options(),
                reasoning_effort=self.reasoning_effort,
                continue_final_message=bool(self.continue_final_message),
                add_generation_prompt=self.add_generation_prompt is not False,
            )
        except ValueError as error:  # its message begins with the field's name
            problem = str(error).replace("template_options", _TEMPLATE_OPTIONS, 1)
            name, _, _ = problem.partition(":")
            raise InvalidParamError(name, problem) from error

    def _template_options(self) -> dict[str, Any]:
        found = self.chat_template_kwargs or {}
        if self.enable_thinking is None:
            return found
        if found.get("enable_thinking", self.enable_thinking) != self.enable_thinking:
            raise InvalidParamError(
                "enable_thinking", f"enable_thinking: expected the value that {_TEMPLATE_OPTIONS} has too"
            )
        return {**found, "enable_thinking": self.enable_thinking}


class CompletionRequest(_Request, frozen=True, kw_only=True):
    """`POST /v1/completions`: a raw prompt, without the chat template."""

    neutral = COMPLETION_NEUTRAL

    prompt: Any
    best_of: int | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None

    @property
    def wanted_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def shows_prompt(self) -> bool:
        return bool(self.echo)

    def prompts(self, settings: GatewaySettings) -> list[Inputs]:
        if self.best_of is not None and self.best_of != self.answers:
            raise NotSupportedError("best_of", self.best_of, f"{self.answers}, which is n")
        prompts = prompt_list("prompt", self.prompt)
        request_limits.check_choices(len(prompts), self.answers, settings)
        for where, prompt in prompts:
            if prompt == [] or not isinstance(prompt, str | list):
                found = described(prompt)
                raise InvalidParamError(
                    "prompt", f"{where}: expected a string or an array of token ids, found {found}"
                )
        return [prompt_inputs("prompt", where, prompt) for where, prompt in prompts]


_R = TypeVar("_R", ChatRequest, CompletionRequest)


def parse(kind: type[_R], body: dict[str, Any], family: Options | None = None) -> _R:
    """Parse a JSON object; `family` declares the options of the model's family.

    The media of a chat's messages have been taken out before (`gateway.media.parts`).

    Raises:
        InvalidParamError: a field is of the wrong type, missing, or not supported.
    """
    _refuse_fields_of_other_apis(kind, body)
    body = with_guide(body)
    if "thinking_budget" in kind.__struct_fields__:
        body = _with_our_limit(body)
    body = with_options(body, kind.__struct_fields__, family)
    check_fields(body, kind.__struct_fields__, kind.neutral, options.names(family))
    if kind is ChatRequest:
        _refuse_other_tools(body)
        check_chat_fields(body)
    request = converted(body, kind)
    check_stream_options(body.get("stream_options"), is_stream=bool(request.stream))
    return request


def with_options(body: dict[str, Any], fields: Collection[str], family: Options | None) -> dict[str, Any]:
    """Return the body with the options of the model's family under `options`, checked; null is absent.

    `fields` are those of the route. One is never an option, also if an option has the same name.

    Raises:
        ClientError: an option is unknown, given twice, or its value is wrong.
    """
    accepted = (*options.names(family), *options.other_names(family))
    own = [name for name in accepted if name in body and name not in fields]
    nested = body.get("options")
    if nested is not None and not isinstance(nested, dict):
        raise InvalidParamError("options", f"options: expected an object, found {described(nested)}")
    nested = {name: value for name, value in (nested or {}).items() if value is not None}
    nested = options.renamed(family, nested, "options.")
    options.check(family, nested)
    given = options.renamed(family, {name: body[name] for name in own if body[name] is not None})
    options.check(family, given, "")
    for name in given.keys() & nested.keys():
        raise InvalidParamError(name, f"{name}: expected it once, found it also in options")
    rest = {name: value for name, value in body.items() if name not in own and name != "options"}
    return {**rest, "options": {**nested, **given}} if nested or given else rest


def _with_thoughts(message: dict[str, Any]) -> dict[str, Any]:
    """A message with its reasoning under the name that templates read; some clients return it as another."""
    if "reasoning" not in message:
        return message
    rest = {name: value for name, value in message.items() if name != "reasoning"}
    thought = message["reasoning"]
    return (
        rest if thought is None or rest.get("reasoning_content") else {**rest, "reasoning_content": thought}
    )


def _with_our_limit(body: dict[str, Any]) -> dict[str, Any]:
    """A chat's body with vLLM's limit of the reasoning under our name.

    Raises:
        InvalidParamError: the limit is given twice.
    """
    theirs, ours = "thinking_token_budget", "thinking_budget"
    if body.get(theirs) is None:
        return body
    if body.get(ours) is not None:
        raise InvalidParamError(theirs, f"{theirs}: expected one limit of the reasoning, found also {ours}")
    return {name: value for name, value in body.items() if name != theirs} | {ours: body[theirs]}


def _refuse_fields_of_other_apis(kind: type[_Request], body: dict[str, Any]) -> None:
    """Refuse the prompt fields of other routes and APIs: ignoring them would lose the question."""
    if kind is ChatRequest and body.get("system") is not None:
        advice = "send it as the first of the messages, with the role 'system'"
        raise InvalidParamError("system", f"system: no field of this route; {advice}", code="not_supported")
    for wanted, given, route in (
        ("messages", "prompt", "/v1/completions"),
        ("prompt", "messages", "/v1/chat/completions"),
    ):
        if wanted in kind.__struct_fields__ and body.get(wanted) is None and body.get(given) is not None:
            raise InvalidParamError(
                wanted,
                f"{wanted}: expected it, found nothing but {given}, which POST {route} takes",
                code="missing_required_parameter",
            )


def _refuse_other_tools(body: dict[str, Any]) -> None:
    """Refuse OpenAI's tools and tool choices that are not functions."""
    tools, choice = body.get("tools"), body.get("tool_choice")
    kinds = [(f"tools[{n}]", tool) for n, tool in enumerate(tools)] if isinstance(tools, list) else []
    for where, found in (*kinds, ("tool_choice", choice)):
        kind = found.get("type") if isinstance(found, dict) else None
        if kind in ("custom", "allowed_tools"):
            raise NotSupportedError(f"{where}.type", kind, '"function"')


def _check_message(where: str, message: dict[str, Any], calls: set[str]) -> None:
    """Refuse a message that is not text; `calls` are the ids of earlier tool calls, and are extended."""
    role = message.get("role")
    if role not in ROLES:
        found = described(role) if "role" in message else "nothing"
        raise InvalidParamError(
            f"{where}.role", f"{where}.role: expected one of {', '.join(ROLES)}, found {found}"
        )
    if message.get("function_call") is not None:
        raise NotSupportedError(f"{where}.function_call", message["function_call"], "tool_calls")
    if message.get("tool_calls") is not None:
        calls |= _ids_of_calls(f"{where}.tool_calls", role, message["tool_calls"])
    answered = message.get("tool_call_id")
    if answered is not None and (role != "tool" or not isinstance(answered, str) or answered not in calls):
        raise InvalidParamError(
            f"{where}.tool_call_id",
            f"{where}.tool_call_id: expected, in a message of the role 'tool', the id of one of the "
            f"tool_calls before it, found {described(answered)}",
        )
    content = message.get("content")
    if content is None and role == "assistant":
        return
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        raise InvalidParamError(
            f"{where}.content",
            f"{where}.content: expected a string or an array of parts, found {described(content)}",
        )
    for number, part in enumerate(content):
        _check_part(f"{where}.content[{number}]", part)


def _ids_of_calls(where: str, role: str, found: object) -> set[str]:
    """The ids of the tool calls in an assistant's message."""
    if role != "assistant":
        raise InvalidParamError(where, f"{where}: expected none in a message of the role {role!r}")
    return {call.id for call in converted(found, list[_ToolCall], where)}


def _check_part(where: str, part: object) -> None:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        raise InvalidParamError(where, f"{where}: expected an object with a type, found {described(part)}")
    if is_placed(part):
        return
    if kind != "text":
        raise InvalidParamError(
            where,
            f"{where}: expected a part of the type text, {', '.join(PART_TYPES)}, found {described(kind)}",
        )
    if not isinstance(part.get("text"), str):
        raise InvalidParamError(
            f"{where}.text", f"{where}.text: expected a string, found {described(part.get('text'))}"
        )
