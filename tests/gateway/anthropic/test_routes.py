"""`POST /v1/messages`: what goes on the log, the answers, and errors in the words of the body."""

import base64
import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from configs.deployment import GatewaySettings
from configs.secrets import ApiKey
from shared.events import Failure, RequestSubmitted
from tests.gateway.media.world import png, seeing, submitted
from tests.gateway.openai.test_sdk import saying
from tests.gateway.world import Performance, Script, deployment, echo, named_events

PATH = "/v1/messages"
ASKED: dict[str, Any] = {
    "model": "demo",
    "max_tokens": 20,
    "messages": [{"role": "user", "content": "What does len do?"}],
}
WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ulm"}}\n</tool_call>'


async def asked(script: Script = echo, **change: Any) -> tuple[Any, list[RequestSubmitted]]:
    """The response, and the submitted events."""
    async with deployment(script, tool_calls="hermes") as world:
        response = await world.client.post(PATH, json=ASKED | change)
        found = [event for event in world.events("request") if isinstance(event, RequestSubmitted)]
    return response, found


# ---- what goes on the log ------------------------------------------------------------------------


async def test_a_message_is_a_chat() -> None:
    _, [event] = await asked(
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        stop_sequences=["END"],
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        metadata={"user_id": "u"},
        service_tier="auto",
        thinking={"type": "disabled"},
        timeout_s=9,
    )
    assert event.inputs.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What does len do?"},
    ]
    params = event.params
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (20, 0.5, 0.9, 3)
    assert params.stop == ["END"]
    assert event.timeout_s == 9


async def test_tools_calls_and_results_are_those_of_a_chat() -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Is it warm"}]},
        {"role": "user", "content": "in Ulm?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I need a tool.", "signature": ""},
                {"type": "text", "text": "Let me look."},
                {"type": "tool_use", "id": "call_1", "name": "get_weather", "input": {"city": "Ulm"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "call_1",
                    "content": [{"type": "text", "text": "rain"}],
                },
                {"type": "text", "text": "And tomorrow?"},
            ],
        },
    ]
    choice = {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True}
    _, [event] = await asked(messages=messages, tools=[WEATHER], tool_choice=choice)
    first, called, result, last = event.inputs.messages or []
    assert first["content"] == [{"type": "text", "text": "Is it warm"}, {"type": "text", "text": "in Ulm?"}]
    assert called["content"] == "Let me look."
    assert called["reasoning_content"] == "I need a tool."
    [call] = called["tool_calls"]
    assert (call["id"], call["function"]["name"]) == ("call_1", "get_weather")
    assert json.loads(call["function"]["arguments"]) == {"city": "Ulm"}
    assert result == {"role": "tool", "tool_call_id": "call_1", "content": "rain"}
    assert last == {"role": "user", "content": "And tomorrow?"}
    [tool] = event.inputs.tools
    assert tool.function.parameters == WEATHER["input_schema"]
    assert event.inputs.tool_choice.function.name == "get_weather"  # type: ignore[union-attr]
    assert not event.inputs.parallel_tool_calls


@pytest.mark.parametrize(("kind", "wanted"), [("auto", "auto"), ("any", "required"), ("none", "none")])
async def test_a_choice_of_tools_has_openais_name(kind: str, wanted: str) -> None:
    _, [event] = await asked(tools=[WEATHER], tool_choice={"type": kind})
    assert event.inputs.tool_choice == wanted


async def test_a_schema_of_the_output_is_a_guide_and_a_system_message_stays_in_its_place() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    messages = [*ASKED["messages"], {"role": "system", "content": [{"type": "text", "text": "Now in JSON."}]}]
    _, [event] = await asked(
        messages=messages, output_config={"format": {"type": "json_schema", "schema": schema}}
    )
    assert event.params.guide is not None
    assert event.params.guide.json_schema == schema
    assert (event.inputs.messages or [])[-1] == {"role": "system", "content": "Now in JSON."}


async def test_a_tool_that_failed_without_a_word_says_so() -> None:
    use = {"type": "tool_use", "id": "c1", "name": "get_weather", "input": {}}
    messages = [
        *ASKED["messages"],
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "is_error": True}]},
    ]
    _, [event] = await asked(messages=messages, tools=[WEATHER])
    assert (event.inputs.messages or [])[-1]["content"] == "The tool failed."


# ---- answers -----------------------------------------------------------------------------------------


async def test_an_answer_is_one_message() -> None:
    async def script(performance: Performance) -> None:
        performance.say("It counts.", [1, 2, 3])
        performance.finish(cached_tokens=4)

    response, [event] = await asked(script)
    assert response.json() == {
        "id": event.request_id,
        "type": "message",
        "role": "assistant",
        "model": "demo",
        "content": [{"type": "text", "text": "It counts."}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 3,
            "cache_read_input_tokens": 4,
            "cache_creation_input_tokens": 0,
            "output_tokens": 3,
        },
    }
    assert str(event.request_id).startswith("msg")


@pytest.mark.parametrize(
    ("reason", "stopped_by", "found"),
    [
        ("stop", None, ("end_turn", None)),
        ("stop", 2, ("end_turn", None)),
        ("stop", "END", ("stop_sequence", "END")),
        ("stop", "<of the model>", ("end_turn", None)),
        ("length", None, ("max_tokens", None)),
    ],
)
async def test_the_stop_reason_names_the_clients_sequence(
    reason: str, stopped_by: str | int | None, found: tuple[str, str | None]
) -> None:
    async def script(performance: Performance) -> None:
        performance.say("It counts.")
        performance.finish(reason, stopped_by=stopped_by)

    document, _ = await asked(script, stop_sequences=["END"])
    assert (document.json()["stop_reason"], document.json()["stop_sequence"]) == found
    stream, _ = await asked(script, stop_sequences=["END"], stream=True)
    [delta] = [event["delta"] for event in named_events(stream) if event["type"] == "message_delta"]
    assert (delta["stop_reason"], delta["stop_sequence"]) == found


async def test_a_stream_has_a_block_of_text_between_its_start_and_its_end() -> None:
    response, _ = await asked(stream=True)
    events = named_events(response)
    assert [event["type"] for event in events] == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * 4,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert events[0]["message"]["content"] == []
    assert "".join(event["delta"]["text"] for event in events[2:6]) == "What does len do?"
    assert events[-2]["usage"]["output_tokens"] == 4
    assert events[-2]["usage"]["input_tokens"] == 7


@pytest.mark.parametrize("size", [1, 7, 200])
async def test_a_call_is_a_block_of_its_own(size: int) -> None:
    script = saying(f"Let me look.\n{CALL}\n{CALL}", size)
    document, _ = await asked(script, tools=[WEATHER])
    text, *calls = document.json()["content"]
    assert text["text"].strip() == "Let me look."
    assert [(one["type"], one["name"], one["input"]) for one in calls] == [
        ("tool_use", "get_weather", {"city": "Ulm"})
    ] * 2
    assert document.json()["stop_reason"] == "tool_use"
    stream, _ = await asked(script, tools=[WEATHER], stream=True)
    events = named_events(stream)
    starts = [event for event in events if event["type"] == "content_block_start"]
    assert [one["index"] for one in starts] == list(range(len(starts)))
    for start in (one for one in starts if one["content_block"]["type"] == "tool_use"):
        pieces = [
            event["delta"]["partial_json"]
            for event in events
            if event["type"] == "content_block_delta" and event["index"] == start["index"]
        ]
        assert json.loads("".join(pieces)) == {"city": "Ulm"}
        assert start["content_block"]["input"] == {}
    stops = [event["index"] for event in events if event["type"] == "content_block_stop"]
    assert stops == list(range(len(starts)))
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


async def test_a_stream_is_resumed_after_any_of_its_events() -> None:
    body = ASKED | {"stream": True, "request_id": "mine", "tools": [WEATHER]}
    async with deployment(saying(f"Look.\n{CALL}", 5), tool_calls="hermes") as world:
        whole = (await world.client.post(PATH, json=body)).text
        blocks = whole.split("\n\n")[:-1]
        for count, block in enumerate(blocks, 1):
            position = block.split("\n")[1].removeprefix("id: ")
            if count < len(blocks) and f"id: {position}\n" in blocks[count]:
                continue  # events of one chunk have one position
            rest = await world.client.post(PATH, json=body, headers={"last-event-id": position})
            assert rest.text == "".join(f"{one}\n\n" for one in blocks[count:])


async def test_the_published_schema_has_the_stream_and_anthropics_errors() -> None:
    async with deployment() as world:
        document = (await world.client.get("/openapi.json")).json()
        refused = await world.client.post(PATH, json={})
    route = document["paths"][PATH]["post"]
    required = route["requestBody"]["content"]["application/json"]["schema"]["required"]
    assert sorted(required) == ["max_tokens", "messages", "model"]
    assert set(route["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
    reference = route["responses"]["400"]["content"]["application/json"]["schema"]["$ref"]
    schema = document["components"]["schemas"][reference.rpartition("/")[2]]
    Draft202012Validator(schema).validate(refused.json())


# ---- errors ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"output_config": {"effort": "much"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "json_schema", "schema": "x"}}},
         "output_config.format.schema"),
        ({"speed": "fast"}, "speed"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": "x", "name": "y"}]}, "messages[0].name"),
        ({"messages": [*ASKED["messages"], {"role": "assistant", "content": ""}]}, "messages[1].content"),
        ({"stop_sequences": ["a"] * 100}, "stop_sequences"),
        ({"temperature": -1}, "temperature"),
        ({"thinking": {"type": "adaptive", "budget_tokens": 1024}}, "thinking.budget_tokens"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
        ({"max_completion_tokens": 5}, "max_completion_tokens"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [WEATHER | {"input_schema": {"type": "string"}}]}, "tools[0].input_schema"),
        ({"tools": [WEATHER | {"name": "a b"}]}, "tools[0].name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"system": "Be brief.", "messages": [{"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "never", "content": "x"}]}]}, "messages[0].tool_call_id"),
        ({"model": "other"}, "model"),
    ],
)  # fmt: skip
async def test_an_error_has_anthropics_schema_and_names_what_the_client_wrote(
    change: dict[str, Any], place: str
) -> None:
    response, events = await asked(**change)
    body = response.json()
    assert response.status_code in (400, 404), body
    assert body["type"] == "error"
    assert body["error"]["param"] == place, body
    assert place in body["error"]["message"] or place == "model"
    kind = "not_found_error" if response.status_code == 404 else "invalid_request_error"
    assert body["error"]["type"] == kind
    assert events == []


async def test_every_other_error_of_the_route_has_it_too() -> None:
    async with deployment(
        keys=[ApiKey(name="a", secret="secret")], settings=GatewaySettings(max_body_bytes=1024)
    ) as world:
        key = {"x-api-key": "secret"}
        missing = await world.client.post(PATH, json=ASKED)
        wrong = await world.client.post(PATH, json=ASKED, headers={"x-api-key": "guessed"})
        large = await world.client.post(PATH, content=b" " * 5000, headers=key)
        method = await world.client.get(PATH, headers=key)
        unknown = await world.client.post(f"{PATH}/batches", json={}, headers=key)
        right = await world.client.post(PATH, json=ASKED, headers=key)
        elsewhere = await world.client.post("/v1/chat/completions", json={}, headers=key)
    found = [
        (one.status_code, one.json()["error"]["type"]) for one in (missing, wrong, large, method, unknown)
    ]
    assert found == [
        (401, "authentication_error"),
        (401, "authentication_error"),
        (413, "request_too_large"),
        (405, "invalid_request_error"),
        (404, "not_found_error"),
    ]
    assert right.status_code == 200
    assert "type" not in elsewhere.json()


@pytest.mark.parametrize("is_stream", [False, True])
async def test_an_answer_that_fails_says_so_in_anthropics_schema(*, is_stream: bool) -> None:
    async def script(performance: Performance) -> None:
        if is_stream:
            performance.say("It")
        performance.fail(Failure(code="worker_lost", message="rank 0 was lost", status=503))

    response, _ = await asked(script, stream=is_stream)
    body = named_events(response)[-1] if is_stream else response.json()
    assert response.status_code == (200 if is_stream else 503)
    assert body["error"]["type"] == "overloaded_error"
    assert body["error"]["message"] == "rank 0 was lost"


@pytest.mark.parametrize("kind", ["base64", "url"])
async def test_an_image_is_a_file_of_the_request(kind: str) -> None:
    encoded = base64.b64encode(png()).decode()
    source = (
        {"type": "base64", "media_type": "image/png", "data": encoded}
        if kind == "base64"
        else {"type": "url", "url": f"data:image/png;base64,{encoded}"}
    )
    content = [{"type": "image", "source": source}, {"type": "text", "text": "What is it?"}]
    async with seeing() as world:
        response = await world.client.post(
            PATH, json=ASKED | {"messages": [{"role": "user", "content": content}]}
        )
        assert response.status_code == 200, response.text
        event = submitted(world)
    [message] = event.inputs.messages or []
    assert [part["type"] for part in message["content"]] == ["image", "text"]
    assert [one.content_type for one in event.inputs.files] == ["image/png"]


async def test_an_image_for_a_model_of_texts_is_refused_where_it_is() -> None:
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(png()).decode()}
    content = [{"type": "image", "source": source}]
    response, _ = await asked(messages=[{"role": "user", "content": content}])
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages[0].content[0].image_url"
