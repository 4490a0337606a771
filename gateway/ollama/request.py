"""Parsing of Ollama's requests: bodies of OpenAI's routes that ask the same.

    POST /api/chat       ->  a chat
    POST /api/generate   ->  a chat of its `system` and `prompt`; with `raw`, a completion

Ollama's calls of tools have no ids, and their results name the tool: a result belongs to the first call
before it that has no result, of that tool if it names one.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from gateway.errors import InvalidParamError, NotSupportedError
from gateway.http.bodies import check_known, check_names, converted, wrong_value
from gateway.requests.parsed_request import DeliveryFields
from shared.errors import ClientError
from shared.validation_errors import described

LATEST: Final = ":latest"
"""The tag that Ollama's clients add to a name without one."""
_OPTIONS: Final[Mapping[str, str]] = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "seed": "seed",
    "stop": "stop",
    "num_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}
"""The options that are supported, and the fields that they are."""
_OF_THE_MACHINE: Final = frozenset(
    {
        "num_ctx", "num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread", "numa", "low_vram",
        "use_mmap", "use_mlock", "vocab_only", "f16_kv", "logits_all", "embedding_only",
        "mirostat_tau", "mirostat_eta",
    }
)  # fmt: skip
"""Options that choose how a server runs, which here the deployment does, and those of a mirostat that is off:
they change no answer."""
_NEUTRAL_OPTIONS: Final[Mapping[str, tuple[object, ...]]] = {
    "mirostat": (0,),
    "tfs_z": (1, 0),
    "typical_p": (1,),
    "penalize_newline": (True,),
}
_UNLIMITED: Final = (-1, -2)
"""Values of `num_predict`: no limit, and that of the context."""
_WHOLE: Final = -1
"""The value of `repeat_last_n` with which penalties see the whole text, as ours do."""
_PENALTIES: Final = ("repeat_penalty", "presence_penalty", "frequency_penalty")
_MESSAGE: Final = ("role", "content", "images", "tool_calls", "tool_name", "tool_call_id", "name", "thinking")
_CALL: Final = ("function", "id", "type")
_CALLED: Final = ("name", "arguments", "index", "description")


class _Common(DeliveryFields, frozen=True, kw_only=True):
    """The fields that both routes have. `keep_alive` is accepted: the model stays loaded."""

    model: str
    stream: bool | None = None
    format: str | dict[str, Any] | None = None
    options: dict[str, Any] | None = None
    keep_alive: float | str | None = None
    think: bool | str | None = None


class ChatBody(_Common, frozen=True, kw_only=True):
    """`POST /api/chat`."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None


class GenerateBody(_Common, frozen=True, kw_only=True):
    """`POST /api/generate`."""

    prompt: str = ""
    suffix: str | None = None
    images: list[str] | None = None
    system: str | None = None
    template: str | None = None
    raw: bool | None = None
    context: list[int] | None = None


def parse_chat(body: dict[str, Any]) -> tuple[ChatBody, dict[str, Any]]:
    """Return a request, and OpenAI's chat that asks the same.

    Raises:
        InvalidParamError: a field is of the wrong type, missing, or not supported.
    """
    asked = converted(_given(body, ChatBody), ChatBody)
    fields = _common(asked)
    fields["messages"] = messages = _messages(asked.messages)
    last = messages[-1] if messages else {}
    if last.get("role") == "assistant" and last["content"] and "tool_calls" not in last:
        fields["continue_final_message"] = True  # as Ollama does
    if asked.tools:
        fields["tools"] = asked.tools
    return asked, fields


def parse_generate(body: dict[str, Any]) -> tuple[GenerateBody, dict[str, Any]]:
    """Return a request, and OpenAI's chat or, with `raw`, completion that asks the same.

    Raises:
        InvalidParamError: a field is of the wrong type, missing, or not supported.
    """
    asked = converted(_given(body, GenerateBody), GenerateBody)
    for name, value in (("suffix", asked.suffix), ("template", asked.template), ("context", asked.context)):
        if value:
            raise NotSupportedError(name, value, "null")
    fields = _common(asked)
    if asked.raw:
        if asked.images or asked.system:
            raise InvalidParamError("raw", "raw: expected a prompt alone, found it beside images or system")
        return asked, fields | {"prompt": asked.prompt}
    if not asked.prompt and not asked.images:
        return asked, fields | {"messages": []}
    messages: list[dict[str, Any]] = [{"role": "user", "content": asked.prompt, "images": asked.images}]
    if asked.system:
        messages.insert(0, {"role": "system", "content": asked.system})
    return asked, fields | {"messages": _messages(messages)}


def in_ollamas_words(error: ClientError, *, is_chat: bool) -> ClientError:
    """An error about the body of OpenAI's, in the words of Ollama's."""
    param = getattr(error, "param", None)
    if not isinstance(param, str):
        return error
    if (image := _IMAGE.match(param)) is not None:
        place = f"messages[{image[1]}].images[{image[2]}]" if is_chat else f"images[{image[2]}]"
    elif param in _NAMES:
        place = _NAMES[param]
    else:
        return error
    message = error.message.replace(param, place, 1)
    return InvalidParamError(place, message, code=error.failure_code, status=error.failure_status)


_NAMES: Final = {
    **{field: f"options.{name}" for name, field in _OPTIONS.items()},
    "enable_thinking": "think",
    "reasoning_effort": "think",
}
_IMAGE: Final = re.compile(r"messages\[(\d{1,6})\]\.content\[(\d{1,6})\]\.file.*")


def _given(body: Mapping[str, Any], kind: type[msgspec.Struct]) -> dict[str, Any]:
    """The fields of a body that are not null, checked by name."""
    given = {name: value for name, value in body.items() if value is not None}
    for name in given:
        check_known(name, kind.__struct_fields__, what="no field of this route")
    return given


def _common(asked: _Common) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "model": asked.model,
        "stream": asked.stream is not False,
        "request_id": asked.request_id,
        "timeout_s": asked.timeout_s,
        "linger_s": asked.linger_s,
        "priority": asked.priority,
        **options_of(asked.options or {}),
        "reasoning_effort" if isinstance(asked.think, str) else "enable_thinking": asked.think,
    }
    match asked.format:
        case None | "":
            pass
        case "json":
            fields["guide"] = {"json_object": True}
        case dict():
            fields["guide"] = {"json_schema": asked.format}
        case other:
            raise InvalidParamError(
                "format", f'format: expected "json" or a JSON schema, found {described(other)}'
            )
    return {name: value for name, value in fields.items() if value is not None}


def options_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that change an answer, under the names of OpenAI's fields.

    Raises:
        InvalidParamError: one is unknown, or its value is not supported.
    """
    found: dict[str, Any] = {}
    for name, value in options.items():
        if value is None or name in _OF_THE_MACHINE:
            continue
        if name == "repeat_last_n":
            if value != _WHOLE and any(options.get(one) is not None for one in _PENALTIES):
                raise NotSupportedError(
                    "options.repeat_last_n", value, "-1, for penalties over the whole text"
                )
            continue
        if name in _NEUTRAL_OPTIONS:
            if value not in _NEUTRAL_OPTIONS[name]:
                allowed = " or ".join(map(str, _NEUTRAL_OPTIONS[name])) or "nothing"
                raise NotSupportedError(f"options.{name}", value, allowed)
            continue
        check_known(name, _OPTIONS, "options.", what="unknown option")
        if not (name == "num_predict" and value in _UNLIMITED):
            found[_OPTIONS[name]] = value
    return found


# ---- messages ----------------------------------------------------------------------------------------------


def _messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages in OpenAI's form."""
    made: list[dict[str, Any]] = []
    open_calls: list[tuple[str, str]] = []  # the calls without a result: id and name
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        check_names(where, message, _MESSAGE)
        found: dict[str, Any] = {"role": message.get("role"), "content": message.get("content", "")}
        if message.get("thinking"):
            found["reasoning_content"] = message["thinking"]
        if calls := message.get("tool_calls"):
            found["tool_calls"] = _calls(where, number, calls)
            open_calls += [(call["id"], call["function"]["name"]) for call in found["tool_calls"]]
        if found["role"] == "tool":
            found["tool_call_id"] = _result(where, message, open_calls)
        if images := message.get("images"):
            found["content"] = [
                *_images(f"{where}.images", images),
                {"type": "text", "text": found["content"]},
            ]
        made.append(found)
    return made


def _calls(where: str, number: int, calls: Any) -> list[dict[str, Any]]:
    place = f"{where}.tool_calls"
    if not isinstance(calls, list):
        raise wrong_value(place, "an array", calls)
    found = []
    for index, call in enumerate(calls):
        here = f"{place}[{index}]"
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidParamError(
                here, f"{here}: expected an object with a function, found {described(call)}"
            )
        check_names(here, call, _CALL)
        check_names(f"{here}.function", function, _CALLED)
        arguments = function.get("arguments") or {}
        written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        found.append(
            {
                "id": call.get("id") or f"call_{number}_{index}",
                "type": "function",
                "function": {"name": function["name"], "arguments": written},
            }
        )
    return found


def _result(where: str, message: Mapping[str, Any], open_calls: list[tuple[str, str]]) -> str:
    """The id of the call that a result belongs to; the call is taken out of `open_calls`."""
    given, name = message.get("tool_call_id"), message.get("tool_name") or message.get("name")
    for place, (call_id, called) in enumerate(open_calls):
        if given in (None, call_id) and (given is not None or name in (None, called)):
            del open_calls[place]
            return call_id
    wanted = given or name or "a tool"
    raise InvalidParamError(where, f"{where}: expected a call of {wanted} before its result, found none")


def _images(where: str, images: Any) -> list[dict[str, Any]]:
    if not isinstance(images, list) or not all(isinstance(one, str) for one in images):
        raise InvalidParamError(
            where, f"{where}: expected an array of images in base64, found {described(images)}"
        )
    return [{"type": "file", "file": {"file_data": one}} for one in images]
