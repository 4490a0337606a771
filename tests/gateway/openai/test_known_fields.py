"""Fields that are unknown, or not supported, on every route."""

from typing import Any

import pytest

from tests.gateway.world import CHAT, deployment

CHATS, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
BODIES: dict[str, dict[str, Any]] = {
    CHATS: CHAT,
    COMPLETIONS: {"model": "demo", "prompt": "a"},
    EMBEDDINGS: {"model": "demo", "input": "a"},
    "/generate": {"text": "a", "streaming": False},
    "/warm": {"text": "a"},
}
OF_OTHERS = (
    "chat_template", "chat_template_kwargs", "reasoning_effort", "lora", "lora_path", "cache_salt",
    "allowed_token_ids", "truncate_prompt_tokens", "temprature", "max_completion_token", "thinking",
)  # fmt: skip


KNOWN = {
    (EMBEDDINGS, "truncate_prompt_tokens"),
    *((path, name) for path in (CHATS, "/generate") for name in ("chat_template_kwargs", "reasoning_effort")),
    *(
        (path, name)
        for path in (CHATS, COMPLETIONS)
        for name in ("cache_salt", "allowed_token_ids", "truncate_prompt_tokens")
    ),
}
"""The fields among these that a route has."""


async def refused(path: str, fields: dict[str, Any]) -> dict[str, Any]:
    """The error of a request, which is not on the log."""
    async with deployment() as world:
        answer = await world.client.post(path, json=BODIES[path] | fields)
        assert not world.events("request")
    assert answer.status_code == 400, answer.text
    found: dict[str, Any] = answer.json()["error"]
    return found


async def accepted(path: str, fields: dict[str, Any]) -> bool:
    async def embed(performance: Any) -> None:
        if path == EMBEDDINGS:
            performance.vector([1.0])
        else:
            performance.say("a")
        performance.finish()

    async with deployment(embed) as world:
        answer = await world.client.post(path, json=BODIES[path] | fields)
    return answer.status_code == 200


@pytest.mark.parametrize(
    ("path", "name"),
    [(path, name) for path in BODIES for name in OF_OTHERS if (path, name) not in KNOWN],
)
async def test_a_field_that_would_be_ignored_is_refused_by_name(path: str, name: str) -> None:
    error = await refused(path, {name: "x"})

    assert error["param"] == name
    assert error["code"] in ("unknown_parameter", "not_supported")
    assert name in error["message"]


@pytest.mark.parametrize(
    ("path", "name", "suggestion"),
    [
        (CHATS, "temprature", "temperature"),
        (COMPLETIONS, "max_token", "max_tokens"),
        (EMBEDDINGS, "dimension", "dimensions"),
        (CHATS, "guided_decoding", "guide"),
        (CHATS, "max_new_tokens", "max_tokens"),
    ],
)
async def test_the_closest_name_is_suggested(path: str, name: str, suggestion: str) -> None:
    assert f"did you mean {suggestion!r}?" in (await refused(path, {name: 1}))["message"]


@pytest.mark.parametrize("path", [CHATS, COMPLETIONS, EMBEDDINGS])
async def test_null_is_absent(path: str) -> None:
    assert await accepted(path, dict.fromkeys(OF_OTHERS))


@pytest.mark.parametrize(
    "fields",
    [
        {
            "user": "u",
            "metadata": {"a": "b"},
            "store": False,
            "service_tier": "auto",
        },
        {"logit_bias": {}, "n": 1, "stop": [], "tools": [], "functions": [], "function_call": "auto"},
        {"stream": False, "logprobs": False, "frequency_penalty": 0, "presence_penalty": 0, "top_p": 1},
        {"safety_identifier": "s", "prompt_cache_key": "k", "verbosity": "medium", "modalities": ["text"]},
        {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}},
        {"skip_special_tokens": True, "use_beam_search": False, "length_penalty": 1.0},
    ],
)
async def test_fields_that_ask_for_nothing_are_accepted(fields: dict[str, Any]) -> None:
    assert await accepted(CHATS, fields)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"store": True}, "store"),
        ({"service_tier": "priority"}, "service_tier"),
        ({"stream": True, "stream_options": {"include_usge": True}}, "stream_options.include_usge"),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
        ),
        ({"response_format": {"type": "text", "x": 1}}, "response_format"),
        ({"messages": [{"role": "user", "content": "a", "contents": "b"}]}, "messages[0].contents"),
        ({"messages": [{"role": "assistant", "content": "a", "audio": {"id": "x"}}]}, "messages[0].audio"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "txt": ""}]}]},
            "messages[0].content[0].txt",
        ),
        ({"guide": {"regexp": "a"}}, "guide.regexp"),
    ],
)
async def test_values_and_nested_fields_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    assert str((await refused(CHATS, fields))["param"]).startswith(param)


async def test_an_answer_of_the_sdk_is_accepted_back() -> None:
    message: dict[str, Any] = {
        "role": "assistant", "content": "a", "refusal": None, "annotations": [], "audio": None,
        "function_call": None, "tool_calls": None, "parsed": None, "reasoning_content": None,
    }  # fmt: skip
    assert await accepted(CHATS, {"messages": [message, {"role": "user", "content": "b"}]})


async def test_an_answer_of_litellm_is_accepted_back() -> None:
    own = {"provider_specific_fields": {"refusal": None}}
    hint = {"cache_control": {"type": "ephemeral"}}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"} | own} | own
    messages = [
        {"role": "system", "content": "a"} | hint,
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": None, "tool_calls": [call]} | own,
        {"role": "tool", "tool_call_id": "c", "content": "d"},
    ]

    assert await accepted(CHATS, {"messages": messages})
