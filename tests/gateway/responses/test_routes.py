"""`/v1/responses`: requests on the log, responses and events by OpenAI's schema, and stored responses."""

import asyncio
import json
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from configs.secrets import ApiKey
from shared.events import Failure, Guide, RequestCancel, RequestSubmitted
from tests.gateway.openai.test_logprobs import token
from tests.gateway.openai.test_reasoning import PIECES, THOUGHT, thinking
from tests.gateway.world import Performance, Script, World, deployment, echo, listening, named_events

PATH = "/v1/responses"
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather in a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
CALLS = thinking([*PIECES[:3], f"ink>Let me see. {CALL}", f"\n{CALL}"])


async def made(world: World, **body: Any) -> dict[str, Any]:
    response = await world.client.post(PATH, json={"input": "x", **body})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def submitted(world: World) -> list[RequestSubmitted]:
    return [event for event in world.events("request") if isinstance(event, RequestSubmitted)]


# ---- requests --------------------------------------------------------------------------------------------


async def test_a_response_is_a_chat_on_the_log() -> None:
    async with deployment(tool_calls="hermes") as world:
        response = await made(
            world,
            instructions="Be brief.",
            input=[{"role": "user", "content": "a"}],
            max_output_tokens=9,
            temperature=0.5,
            seed=3,
            tools=[WEATHER],
            tool_choice={"type": "function", "name": "get_weather"},
            parallel_tool_calls=False,
            reasoning={"effort": "low"},
            metadata={"a": "b"},
            user="u",
            truncation="disabled",
            include=["reasoning.encrypted_content"],
        )
        [event] = submitted(world)

    assert event.inputs.messages == [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "a"},
    ]  # fmt: skip
    params = event.params
    assert (params.max_tokens, params.temperature, params.seed) == (9, 0.5, 3)
    assert event.inputs.reasoning_effort == "low"
    assert not event.inputs.parallel_tool_calls
    assert response["instructions"] == "Be brief."
    assert response["metadata"] == {"a": "b"}
    assert response["reasoning"] == {"effort": "low", "summary": None}
    assert response["tools"] == [WEATHER]
    assert response["tool_choice"] == {"type": "function", "name": "get_weather"}
    assert (response["max_output_tokens"], response["temperature"]) == (9, 0.5)


@pytest.mark.parametrize(
    ("form", "guide"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, Guide(json_object=True)),
        ({"type": "json_schema", "name": "a", "schema": {"type": "object"}, "strict": True},
         Guide(json_schema={"type": "object"})),
    ],
)  # fmt: skip
async def test_a_format_is_a_guide(form: dict[str, Any], guide: Guide | None) -> None:
    async with deployment() as world:
        response = await made(world, text={"format": form})
        [event] = submitted(world)

    assert event.params.guide == guide
    assert response["text"]["format"] == form


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": None}, "input"),
        ({"input": [{"role": "user", "content": []}, {"role": "user", "content": 5}]}, "input[1].content"),
        ({"truncation": "auto"}, "truncation"),
        ({"background": True, "store": False}, "store"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "top_logprobs"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"reasoning": {"effort": "much"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{**WEATHER, "name": "a b"}]}, "tools[0].name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"metadata": {"a": 5}}, "metadata.a"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"model": "other"}, "model"),
        ({"previous_response_id": "never"}, "previous_response_id"),
    ],
)
async def test_what_is_wrong_is_named(change: dict[str, Any], param: str) -> None:
    async with deployment(tool_calls="hermes") as world:
        response = await world.client.post(PATH, json={"input": "x", **change})
        assert not world.events("request")

    assert response.status_code in (400, 404), response.text
    assert str(response.json()["error"]["param"]).startswith(param)


# ---- answers ---------------------------------------------------------------------------------------------


async def test_reasoning_text_and_calls_are_items() -> None:
    async with deployment(CALLS, tool_calls="hermes", reasoning="think") as world:
        response = await made(world, tools=[WEATHER])

    thought, text, call, other = response["output"]
    assert (thought["type"], thought["content"][0]["text"]) == ("reasoning", THOUGHT)
    assert (text["type"], text["content"][0]["text"].strip()) == ("message", "Let me see.")
    assert (call["type"], call["name"], json.loads(call["arguments"])) == (
        "function_call", "get_weather", {"city": "Ulm"},
    )  # fmt: skip
    assert call["call_id"] != other["call_id"]
    assert response["status"] == "completed"
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == 4


@pytest.mark.parametrize("script", [CALLS, thinking(PIECES), thinking(["No."]), echo])
async def test_the_events_add_up_to_the_response(script: Script) -> None:
    async with deployment(script, tool_calls="hermes", reasoning="think") as world:
        body = {"input": "x", "tools": [WEATHER], "stream": True}
        events = named_events(await world.client.post(PATH, json=body))

    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1]["type"] == "response.completed"
    texts: dict[str, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            texts[event["item_id"]] = texts.get(event["item_id"], "") + event["delta"]
    output = events[-1]["response"]["output"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == output
    for item in output:
        whole = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert texts[item["id"]] == whole


async def test_tokens_of_the_text_are_listed_with_their_log_probabilities() -> None:
    async def think(performance: Performance) -> None:
        performance.say_tokens("<think>", [token("<think>")])
        performance.say_tokens("é</think>", [token(b"\xc3"), token(b"\xa9"), token("</think>")])
        performance.say_tokens(
            "\n\nYé", [token("\n\n"), token("Y", -0.25, Y=-0.25, N=-2.0), token("é", -1.0)]
        )
        performance.say_tokens("s.", [token("s"), token("."), token("<|im_end|>")])
        performance.finish()

    async with deployment(think, reasoning="think") as world:
        response = await made(world, include=["message.output_text.logprobs"], top_logprobs=2)
        body = {"input": "x", "include": ["message.output_text.logprobs"], "stream": True}
        events = named_events(await world.client.post(PATH, json=body))
        again = (await world.client.get(f"{PATH}/{response['id']}")).json()
        params = [event.params.logprobs for event in submitted(world)]

    assert params == [2, 0]
    assert response["top_logprobs"] == 2
    assert again == response
    [_, message] = response["output"]
    listed = message["content"][0]["logprobs"]
    assert [one["token"] for one in listed] == ["Y", "é", "s", "."]
    assert listed[0]["top_logprobs"] == [
        {"token": "Y", "bytes": [89], "logprob": -0.25}, {"token": "N", "bytes": [78], "logprob": -2.0},
    ]  # fmt: skip
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    [done] = [event for event in events if event["type"] == "response.output_text.done"]
    assert [[one["token"] for one in event["logprobs"]] for event in deltas] == [["Y", "é"], ["s", "."]]
    assert [one for event in deltas for one in event["logprobs"]] == done["logprobs"]
    part = events[-1]["response"]["output"][1]["content"][0]
    assert (part["logprobs"], part["text"]) == (done["logprobs"], "Yés.")


async def test_an_answer_without_text_is_an_empty_message() -> None:
    async def end(performance: Performance) -> None:
        performance.finish()

    async with deployment(end) as world:
        response = await made(world)
        events = named_events(await world.client.post(PATH, json={"input": "x", "stream": True}))

    [message] = response["output"]
    assert [part["text"] for part in message["content"]] == [""]
    assert [event["type"].removeprefix("response.") for event in events[2:]] == [
        "output_item.added", "content_part.added", "output_text.done", "content_part.done",
        "output_item.done", "completed",
    ]  # fmt: skip


async def test_an_answer_that_is_cut_off_is_incomplete() -> None:
    async def cut(performance: Performance) -> None:
        performance.say("a")
        performance.finish("length")

    async with deployment(cut) as world:
        response = await made(world)
        events = named_events(await world.client.post(PATH, json={"input": "x", "stream": True}))
        again = (await world.client.get(f"{PATH}/{response['id']}")).json()

    assert (response["status"], response["incomplete_details"]) == (
        "incomplete", {"reason": "max_output_tokens"},
    )  # fmt: skip
    assert response["output"][0]["status"] == "incomplete"
    assert events[-1]["type"] == "response.incomplete"
    assert again == response


async def test_a_stream_that_fails_ends_with_its_failure() -> None:
    async def fail(performance: Performance) -> None:
        performance.say("a")
        performance.fail(Failure(code="worker_error", message="it broke", status=500))

    async with deployment(fail) as world:
        events = named_events(await world.client.post(PATH, json={"input": "x", "stream": True}))
        found = (await world.client.get(f"{PATH}/{events[0]['response']['id']}")).json()

    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["error"]["code"] == "server_error"
    assert (found["status"], found["error"]["message"]) == ("failed", "it broke")


# ---- stored responses ------------------------------------------------------------------------------------


async def test_a_response_is_read_again() -> None:
    async with deployment(CALLS, tool_calls="hermes", reasoning="think") as world:
        response = await made(world, tools=[WEATHER], instructions="Be brief.", metadata={"a": "b"})
        again = (await world.client.get(f"{PATH}/{response['id']}")).json()

    assert {**again, "completed_at": None} == {**response, "completed_at": None}


async def test_events_are_sent_again_behind_a_number() -> None:
    async with deployment(CALLS, tool_calls="hermes", reasoning="think") as world:
        first = await world.client.post(PATH, json={"input": "x", "tools": [WEATHER], "stream": True})
        events = named_events(first)
        path = f"{PATH}/{events[0]['response']['id']}"
        whole = named_events(await world.client.get(path, params={"stream": True}))
        rest = named_events(await world.client.get(path, params={"stream": True, "starting_after": 7}))
        wrong = await world.client.get(path, params={"starting_after": 7})
        assert len(submitted(world)) == 1

    assert whole[:-1] == events[:-1]
    assert rest == whole[8:]
    assert wrong.json()["error"]["param"] == "starting_after"


async def test_a_response_continues_another() -> None:
    async with deployment(CALLS, tool_calls="hermes", reasoning="think") as world:
        first = await made(world, tools=[WEATHER], instructions="Be brief.")
        outputs = [
            {"type": "function_call_output", "call_id": item["call_id"], "output": "12"}
            for item in first["output"]
            if item["type"] == "function_call"
        ]
        second = await made(world, previous_response_id=first["id"], input=outputs, instructions="Be long.")
        listed = (
            await world.client.get(f"{PATH}/{second['id']}/input_items", params={"order": "asc"})
        ).json()
        page = (await world.client.get(f"{PATH}/{second['id']}/input_items", params={"limit": 2})).json()
        [_, event] = submitted(world)

    assert second["previous_response_id"] == first["id"]
    chat = event.inputs.messages or []
    assert [message["role"] for message in chat] == ["system", "user", "assistant", "tool", "tool"]
    assert chat[0]["content"] == "Be long."
    assert chat[2]["reasoning_content"] == THOUGHT
    assert [one["id"] for one in chat[2]["tool_calls"]] == [one["call_id"] for one in outputs]
    assert [item["type"] for item in listed["data"]] == [
        "message", "reasoning", "message", "function_call", "function_call", *["function_call_output"] * 2,
    ]  # fmt: skip
    assert page["data"] == listed["data"][:-3:-1]
    assert page["has_more"]


async def test_an_item_of_a_response_is_named_by_its_id() -> None:
    async with deployment(CALLS, tool_calls="hermes", reasoning="think") as world:
        first = await made(world, tools=[WEATHER])
        references = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
        results = [
            {"type": "function_call_output", "call_id": item["call_id"], "output": "12"}
            for item in first["output"]
            if item["type"] == "function_call"
        ]
        await made(world, input=[{"role": "user", "content": "x"}, *references, *results])
        await made(world, previous_response_id=first["id"], input=results)
        missing = [
            await world.client.post(PATH, json={"input": [{"type": "item_reference", "id": name}]})
            for name in ("never", "msg-never-0", f"msg-{first['id']}-9")
        ]
        [_, named, continued] = submitted(world)

    assert named.inputs.messages == continued.inputs.messages
    assert {one.json()["error"]["code"] for one in missing} == {"item_not_found"}
    assert missing[0].json()["error"]["param"] == "input[0].id"


async def test_a_response_that_is_not_kept_does_not_exist() -> None:
    async with deployment() as world:
        response = await made(world, store=False)
        found = await world.client.get(f"{PATH}/{response['id']}")
        next_one = await world.client.post(PATH, json={"input": "y", "previous_response_id": response["id"]})

    assert response["store"] is False
    assert found.status_code == next_one.status_code == 404
    assert next_one.json()["error"]["param"] == "previous_response_id"


async def test_a_deleted_response_does_not_exist() -> None:
    async with deployment() as world:
        response = await made(world)
        path = f"{PATH}/{response['id']}"
        deleted = await world.client.delete(path)
        after = [await world.client.get(path), await world.client.delete(path)]

    assert deleted.json() == {"id": response["id"], "object": "response.deleted", "deleted": True}
    assert [one.status_code for one in after] == [404, 404]


async def test_a_response_belongs_to_its_key() -> None:
    keys = [ApiKey(name="one", secret="secret-one"), ApiKey(name="two", secret="secret-two")]
    own, other = ({"authorization": f"Bearer {key.secret}"} for key in keys)
    async with deployment(keys=keys) as world:
        made_ = await world.client.post(PATH, json={"input": "x"}, headers=own)
        path = f"{PATH}/{made_.json()['id']}"
        statuses = [(await world.client.get(path, headers=headers)).status_code for headers in (own, other)]

    assert statuses == [200, 404]


async def test_a_request_of_another_route_is_no_response() -> None:
    async with deployment() as world:
        await world.client.post("/v1/completions", json={"model": "demo", "prompt": "x", "request_id": "r1"})
        found = await world.client.get(f"{PATH}/r1")

    assert found.json()["error"]["code"] == "response_not_found"


async def test_a_response_in_the_background_needs_no_client() -> None:
    go = asyncio.Event()

    async def later(performance: Performance) -> None:
        await go.wait()
        performance.say("done")
        performance.finish()

    async with deployment(later) as world:
        response = await made(world, background=True)
        path = f"{PATH}/{response['id']}"
        waiting = (await world.client.get(path)).json()
        go.set()
        performance = await world.performance()
        await world.until(lambda: performance.has_ended)
        found = (await world.client.get(path)).json()
        assert not world.events("control")

    assert response["background"] is True
    assert response["status"] == waiting["status"] == "queued"
    assert (found["status"], found["output"][0]["content"][0]["text"]) == ("completed", "done")


async def test_a_response_in_the_background_begins_queued() -> None:
    async with deployment() as world:
        response = await made(world, background=True)
        named = await made(world, background=True, request_id="r1")
        repeated = await made(world, background=True, request_id="r1")
        body = {"input": "x", "background": True, "stream": True}
        events = named_events(await world.client.post(PATH, json=body))
        path = f"{PATH}/{response['id']}?stream=true&starting_after=0"
        again = named_events(await world.client.get(path))

    assert response["status"] == "queued"
    assert named == repeated, "one with a chosen id may have run before"
    assert named["status"] == "completed"
    first = [(event["type"], event["response"]["status"]) for event in events[:3]]
    assert first == [
        ("response.created", "queued"),
        ("response.queued", "queued"),
        ("response.in_progress", "in_progress"),
    ]
    assert [event["type"] for event in again] == [event["type"] for event in events[1:]]


async def test_only_responses_in_the_background_are_cancelled() -> None:
    async with deployment() as world:
        response = await made(world)
        refused = await world.client.post(f"{PATH}/{response['id']}/cancel")
        ended = await made(world, background=True)
        unchanged = await world.client.post(f"{PATH}/{ended['id']}/cancel")

    assert refused.json()["error"]["code"] == "not_in_background"
    assert unchanged.json()["status"] == "completed"


async def test_a_response_in_the_background_is_cancelled() -> None:
    async def wait(performance: Performance) -> None:
        performance.say("a")
        await performance.cancelled.wait()

    async with deployment(wait) as world:
        response = await made(world, background=True)
        cancelled = await world.client.post(f"{PATH}/{response['id']}/cancel")
        [cancel] = world.events("control")

        path = f"{PATH}/{response['id']}"
        read = (await world.client.get(path)).json()
        events = named_events(await world.client.get(path, params={"stream": "true"}))

    assert isinstance(cancel, RequestCancel)
    assert cancelled.json()["status"] == read["status"] == "cancelled"
    assert events[-1]["response"] == read
    assert read["error"] is None


# ---- the client of OpenAI ----------------------------------------------------------------------------


class City(BaseModel):
    name: str


async def test_openais_client_parses_streams_and_continues() -> None:
    async def answer(performance: Performance) -> None:
        is_guided = performance.event.params.guide is not None
        performance.say('{"name": ' if is_guided else "It is ")
        performance.say('"Ulm"}' if is_guided else "Ulm.")
        performance.finish()

    async with (
        deployment(answer) as world,
        listening(world) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        parsed = await client.responses.parse(model="demo", input="x", text_format=City)
        async with client.responses.stream(model="demo", input="x") as stream:
            deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
            final = await stream.get_final_response()
        again = await client.responses.retrieve(final.id)
        items = await client.responses.input_items.list(final.id)
        await client.responses.delete(final.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(final.id)

    assert parsed.output_parsed == City(name="Ulm")
    assert "".join(deltas) == final.output_text == again.output_text == "It is Ulm."
    assert [item.type for item in items.data] == ["message"]
