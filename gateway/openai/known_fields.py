"""The fields of OpenAI's routes: which are accepted, which are refused by name, and what to send instead.

A field that is ignored would give a silently different answer. So a field is refused unless this gateway
knows it, and so is a value that asks for something that this gateway does not do. Null is absent.
"""

from collections.abc import Collection, Mapping
from typing import Any, Final

import msgspec

from gateway.errors import InvalidParamError, NotSupportedError
from gateway.http.bodies import check_known, check_names
from gateway.openai import request_fields
from gateway.openai.request_fields import CHAT, COMPLETIONS, Support
from shared.validation_errors import described

ABOUT_THE_CLIENT: Final = frozenset(field.name for field in request_fields.of(CHAT, Support.ACCEPTED))
"""Accepted with any value: they describe the client, or are hints that change no answer."""
CHAT_NEUTRAL: Final = request_fields.neutral_values(CHAT)
COMPLETION_NEUTRAL: Final = request_fields.neutral_values(COMPLETIONS)
"""Fields of OpenAI's, and of other servers, that are not supported: the values that change nothing."""
NEUTRAL: Final = {
    name: values for name, values in CHAT_NEUTRAL.items() if COMPLETION_NEUTRAL.get(name) == values
}
"""Those of both routes, which other routes refuse too."""
_INSTEAD: Final[Mapping[str, str]] = {
    "guided_decoding": "guide",
    "max_new_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "gen_length": "max_tokens",
}
"""Names of other servers for what a field of ours does."""
_MESSAGE: Final = (
    "role", "content", "name", "tool_calls", "tool_call_id", "refusal", "annotations", "audio",
    "function_call", "reasoning_content", "reasoning", "parsed", "provider_specific_fields", "cache_control",
)  # fmt: skip
"""The fields of a message, those included that a client returns from an answer.

LiteLLM adds `provider_specific_fields` to the messages and calls that it returns, and people send them back.
"""
_CALL: Final = ("id", "type", "function", "index", "provider_specific_fields")
_CALLED: Final = ("name", "arguments", "parsed_arguments", "provider_specific_fields")
_PART: Final = ("type", "text", "cache_control")
_TOOL: Final = ("type", "function")
_FUNCTION: Final = ("name", "description", "parameters", "strict")


def check_fields(
    body: Mapping[str, Any],
    known: Collection[str],
    neutral: Mapping[str, tuple[object, ...]] = NEUTRAL,
    options: Collection[str] = (),
    *,
    ignored: Collection[str] = ABOUT_THE_CLIENT,
    instead: Mapping[str, str] = _INSTEAD,
) -> None:
    """Refuse the fields of a body that are unknown, or would change the answer and are not supported.

    `options` are the names of the family's options, which errors suggest as well. Fields that are `ignored`
    have any value. `instead` has names of other servers, and what they are called here.

    Raises:
        InvalidParamError: there is one; it suggests the closest name.
    """
    for name, value in body.items():
        if value is None or name in known or name in ignored:
            continue
        if name not in neutral:
            check_known(name, (*known, *options), hint=instead.get(name), what="no field of this route")
        elif value not in neutral[name]:
            allowed = " or ".join(msgspec.json.encode(one).decode() for one in neutral[name]) or "null"
            raise NotSupportedError(name, value, allowed)


def check_chat_fields(body: Mapping[str, Any]) -> None:
    """Refuse unknown fields of a chat's messages and tools. Their values are checked elsewhere.

    Raises:
        InvalidParamError: there is one.
    """
    for number, message in _objects(body.get("messages")):
        where = f"messages[{number}]"
        check_names(where, message, _MESSAGE)
        for part_number, part in _objects(message.get("content")):
            check_names(
                f"{where}.content[{part_number}]", part, _PART if part.get("type") == "text" else part
            )
        for call_number, call in _objects(message.get("tool_calls")):
            place = f"{where}.tool_calls[{call_number}]"
            check_names(place, call, _CALL)
            check_names(f"{place}.function", call.get("function"), _CALLED)
    for number, tool in _objects(body.get("tools")):
        check_names(f"tools[{number}]", tool, _TOOL)
        check_names(f"tools[{number}].function", tool.get("function"), _FUNCTION)
    choice = body.get("tool_choice")
    check_names("tool_choice", choice, _TOOL)
    if isinstance(choice, dict):
        check_names("tool_choice.function", choice.get("function"), ("name",))


def check_stream_options(found: object, *, is_stream: bool) -> None:
    """Refuse options of a stream that are unknown or not supported, or without a stream.

    Raises:
        InvalidParamError: there is one.
    """
    if found is None:
        return
    if not is_stream:
        raise InvalidParamError("stream_options", "stream_options: expected none while stream is not true")
    if not isinstance(found, dict):
        raise InvalidParamError(
            "stream_options", f"stream_options: expected an object, found {described(found)}"
        )
    if found.get("include_obfuscation"):
        raise NotSupportedError("stream_options.include_obfuscation", found["include_obfuscation"], "false")
    check_names("stream_options", found, ("include_usage", "include_obfuscation", "continuous_usage_stats"))


def _objects(found: object) -> list[tuple[int, dict[str, Any]]]:
    """The objects of an array, with their numbers; none if it is no array."""
    if not isinstance(found, list):
        return []
    return [(number, one) for number, one in enumerate(found) if isinstance(one, dict)]
