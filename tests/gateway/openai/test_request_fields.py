"""The table of fields: it has those of other servers, and the gateway does with each what it says."""

from typing import Any

import pytest

from gateway.openai.request_fields import CHAT, COMPLETIONS, FIELDS, Support, of
from shared.events import RequestSubmitted
from tests.gateway.openai.servers_fields import LISTS
from tests.gateway.openai.test_tools import WEATHER
from tests.gateway.world import MESSAGES, deployment

PATHS = {CHAT: "/v1/chat/completions", COMPLETIONS: "/v1/completions"}
PLAIN: dict[str, dict[str, Any]] = {
    CHAT: {"model": "demo", "messages": MESSAGES},
    COMPLETIONS: {"model": "demo", "prompt": "a"},
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
VALUES: dict[str, Any] = {
    "messages": [{"role": "user", "content": "another"}],
    "prompt": "another",
    "modalities": ["text"],
    "tools": [WEATHER],
    "chat_template_kwargs": {"tone": "kind"},
    "truncate_prompt_tokens": 4,
    "truncation_side": "left",
    "cache_salt": "mine",
    "reasoning_effort": "low",
    "enable_thinking": True,
    "thinking_budget": 9,
    "thinking_token_budget": 9,
    "separate_reasoning": False,
    "include_reasoning": False,
    "add_generation_prompt": False,
    "response_format": {"type": "json_object"},
    "guide": {"regex": "a"},
    "structured_outputs": {"regex": "a"},
    "guided_json": SCHEMA,
    "guided_regex": "a",
    "guided_choice": ["a"],
    "guided_grammar": "start: /a/",
    "json_schema": '{"type": "object"}',
    "regex": "a",
    "ebnf": "start: /a/",
    "n": 2,
    "max_tokens": 3,
    "max_completion_tokens": 3,
    "min_tokens": 2,
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "min_p": 0.5,
    "seed": 7,
    "presence_penalty": 1,
    "frequency_penalty": 1,
    "repetition_penalty": 1.5,
    "logit_bias": {"5": 1},
    "bad_words": ["no"],
    "allowed_token_ids": [1, 2],
    "stop": "x",
    "stop_token_ids": [3],
    "ignore_eos": True,
    "echo": True,
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "stream": True,
    "priority": 5,
    "timeout_s": 60,
    "linger_s": 5,
}
"""A value of each supported field that can be sent alone; the others have tests of their own."""
OF_THE_RESPONSE = {
    "return_tokens_as_token_ids",
    "stream",
    "n",
    "separate_reasoning",
    "include_reasoning",
    "modalities",
    "linger_s",
    "timeout_s",
}
"""Fields that change the response, or when it ends, and not the submitted event."""
WITH_OTHERS = {
    "model", "audio", "tool_choice", "parallel_tool_calls", "best_of", "logprobs", "top_logprobs",
    "stream_options", "request_id", "options", "continue_final_message",
}  # fmt: skip
"""Fields that need others, or have another type on each route; other tests have them."""


async def sent(route: str, fields: dict[str, Any]) -> tuple[int, dict[str, Any], Any]:
    """The status, the error, and what the submitted event asks for."""
    async with deployment(tool_calls="hermes") as world:
        response = await world.client.post(PATHS[route], json=PLAIN[route] | fields)
        events = [event for event in world.events("request") if isinstance(event, RequestSubmitted)]
    error = {} if response.status_code == 200 else response.json()["error"]
    first = events[0] if events else None
    return response.status_code, error, first and (first.inputs, first.params, first.priority)


def rows(support: Support) -> list[Any]:
    return [
        pytest.param(route, field, id=f"{route}-{field.name}")
        for route in PATHS
        for field in of(route, support)
    ]


@pytest.mark.parametrize(("server", "route"), LISTS)
def test_every_field_of_another_server_is_in_the_table(server: str, route: str) -> None:
    known = {field.name: field.servers for field in FIELDS if route in field.routes}

    assert set(LISTS[server, route]) - known.keys() == set()
    assert [name for name in LISTS[server, route] if server not in known[name]] == []


def test_a_route_has_each_field_once() -> None:
    for route in PATHS:
        names = [field.name for field in FIELDS if route in field.routes]
        assert len(names) == len(set(names))


def test_each_supported_field_is_tried() -> None:
    assert {field.name for field in FIELDS if field.support is Support.SUPPORTED} == {*VALUES, *WITH_OTHERS}


@pytest.mark.parametrize(("route", "field"), rows(Support.SUPPORTED))
async def test_a_supported_field_has_an_effect(route: str, field: Any) -> None:
    if field.name in WITH_OTHERS:
        return
    status, error, asked = await sent(route, {field.name: VALUES[field.name]})
    _, _, plain = await sent(route, {})

    assert status == 200, error
    assert (asked != plain) is (field.name not in OF_THE_RESPONSE)


@pytest.mark.parametrize(("route", "field"), rows(Support.ACCEPTED))
async def test_an_accepted_field_has_none(route: str, field: Any) -> None:
    plain = await sent(route, {})

    for value in ("x", {"a": "b"}, None):
        assert await sent(route, {field.name: value}) == plain


@pytest.mark.parametrize(("route", "field"), rows(Support.REFUSED))
async def test_a_refused_field_is_refused_by_name_unless_its_value_changes_nothing(
    route: str, field: Any
) -> None:
    status, error, asked = await sent(route, {field.name: {"x": 1}})
    _, _, plain = await sent(route, {})

    assert (status, error["param"], error["code"], asked) == (400, field.name, "not_supported", None)
    for value in (*field.neutral, None):
        assert await sent(route, {field.name: value}) == (200, {}, plain)
