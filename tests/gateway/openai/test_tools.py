"""Tools and response formats: submitted events, refusals, and the format of calls."""

import json
from typing import Any

import msgspec
import pytest

from configs.secrets import ApiKey
from shared.events import Failure, Guide, RequestSubmitted, WorkerLeaving, encode, submission_digest
from tests.gateway.world import CHAT, MESSAGES, Performance, Script, World, deployment, echo

PATH = "/v1/chat/completions"
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TIME: dict[str, Any] = {"type": "function", "function": {"name": "get_time"}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
NAMED = {"type": "function", "function": {"name": "get_time"}}


async def asked(change: dict[str, Any]) -> tuple[Any, list[RequestSubmitted]]:
    """The answer's document, and the submitted event."""
    async with deployment(echo, tool_calls="hermes") as world:
        response = await world.client.post(PATH, json=CHAT | change)
        submitted = [event for event in world.events("request") if isinstance(event, RequestSubmitted)]
    return response, submitted


# ---- what goes on the log ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "guide"),
    [
        ({"type": "text"}, None),
        (None, None),
        ({"type": "json_object"}, Guide(json_object=True)),
        ({"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}},
         Guide(json_schema=SCHEMA)),
        ({"type": "json_schema", "json_schema": {"name": "a", "description": "an a", "schema": SCHEMA}},
         Guide(json_schema=SCHEMA)),
        ({"type": "json_schema", "json_schema": {"name": "a"}}, Guide(json_object=True)),
    ],
)  # fmt: skip
async def test_a_response_format_is_a_guide(form: Any, guide: Guide | None) -> None:
    response, [submitted] = await asked({"response_format": form})

    assert response.status_code == 200
    assert submitted.params.guide == guide


@pytest.mark.parametrize(
    "guide",
    [{"regex": "a+"}, {"choice": ["a", "b"]}, {"grammar": "start: /a/"}, {"json_schema": True}],
)
async def test_a_guide_may_be_said_in_our_own_words(guide: dict[str, Any]) -> None:
    asked: list[tuple[str, dict[str, Any]]] = [
        (PATH, CHAT | {"guide": guide}),
        ("/v1/completions", {"model": "demo", "prompt": "len:", "guide": guide}),
        ("/generate", {"text": "len", "streaming": False, "model_kwargs": {"guide": guide}}),
    ]
    async with deployment() as world:
        for path, body in asked:
            await world.client.post(path, json=body)
        submitted = [event for event in world.events("request") if isinstance(event, RequestSubmitted)]

    assert [event.params.guide for event in submitted] == [msgspec.convert(guide, Guide)] * 3


async def test_tools_ride_with_the_chat() -> None:
    change = {"tools": [WEATHER, TIME], "tool_choice": NAMED, "parallel_tool_calls": False}
    _, [submitted] = await asked(change)

    assert [tool.function.name for tool in submitted.inputs.tools] == ["get_weather", "get_time"]
    assert submitted.inputs.tools[0].function.parameters == WEATHER["function"]["parameters"]
    assert submitted.inputs.tool_choice.function.name == "get_time"  # type: ignore[union-attr]
    assert not submitted.inputs.parallel_tool_calls


async def test_a_chat_without_tools_is_submitted_as_ever() -> None:
    neutral: dict[str, Any] = {"tools": [], "tool_choice": "auto", "parallel_tool_calls": None}
    _, [plain] = await asked({})
    _, [said] = await asked(neutral)

    assert submission_digest(plain) == submission_digest(said)


async def test_calls_and_what_they_came_to_may_be_in_a_chat() -> None:
    made = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [made]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    response, [submitted] = await asked({"messages": messages, "tools": [WEATHER]})

    assert response.status_code == 200
    assert submitted.inputs.messages == messages


# ---- what is refused -----------------------------------------------------------------------------


def _function(**change: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", **change}}]}


def _calling(**change: Any) -> dict[str, Any]:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}, **change}
    return {"messages": [{"role": "assistant", "tool_calls": [call]}]}


def _schema(**change: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": change}}


DEEP: dict[str, Any] = {}
for _ in range(70):
    DEEP = {"not": DEEP}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "param", "code"),
    [
        ({"tools": "all"}, "tools", "invalid_value"),
        ({"tools": [WEATHER] * 2}, "tools", "invalid_value"),
        ({"tools": [WEATHER] * 129}, "tools", "invalid_value"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "missing_required_parameter"),
        ({"tools": [{"function": {"name": "f"}}]}, "tools[0].type", "missing_required_parameter"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type", "not_supported"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "invalid_value"),
        (_function(name="a b"), "tools[0].function.name", "invalid_value"),
        (_function(name=""), "tools[0].function.name", "invalid_value"),
        (_function(name="x" * 65), "tools[0].function.name", "invalid_value"),
        (_function(returns="x"), "tools[0].function.returns", "unknown_parameter"),
        (_function(parameters=[]), "tools[0].function.parameters", "invalid_value"),
        (_function(parameters={"type": "string"}), "tools[0].function.parameters", "invalid_value"),
        (_function(parameters=DEEP), "tools[0].function.parameters", "invalid_value"),
        (_function(strict="yes"), "tools[0].function.strict", "invalid_value"),
        (_function(description="x" * 200_000), "tools", "invalid_value"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"tool_choice": NAMED}, "tool_choice", "invalid_value"),
        ({"tools": [WEATHER], "tool_choice": NAMED}, "tool_choice", "invalid_value"),
        ({"tools": [WEATHER], "tool_choice": "any"}, "tool_choice", "invalid_value"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function"}}, "tool_choice.function",
         "missing_required_parameter"),
        ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools", "allowed_tools": {}}},
         "tool_choice.type", "not_supported"),
        ({"tools": [WEATHER], "parallel_tool_calls": "no"}, "parallel_tool_calls", "invalid_value"),
        (_calling(id=5), "messages[0].tool_calls[0].id", "invalid_value"),
        (_calling(type="custom"), "messages[0].tool_calls[0].type", "invalid_value"),
        (_calling(function={"name": "f"}), "messages[0].tool_calls[0].function.arguments",
         "missing_required_parameter"),
        (_calling(function={"name": "f", "arguments": {}}),
         "messages[0].tool_calls[0].function.arguments", "invalid_value"),
        (_calling(more=1), "messages[0].tool_calls[0].more", "unknown_parameter"),
        (_calling(function={"name": "f", "arguments": "{}", "args": 1}),
         "messages[0].tool_calls[0].function.args", "unknown_parameter"),
        ({"tools": [{**WEATHER, "strict": True}]}, "tools[0].strict", "unknown_parameter"),
        ({"tools": [{"type": "function", "function": {"name": "f", "paramters": {}}}]},
         "tools[0].function.paramters", "unknown_parameter"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "f", "x": 1}}},
         "tool_choice.function.x", "unknown_parameter"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": []}]}, "messages[0].tool_calls",
         "invalid_value"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "a"}]},
         "messages[0].tool_call_id", "invalid_value"),
        ({"messages": [{"role": "assistant", "function_call": {"name": "f", "arguments": ""}}]},
         "messages[0].function_call", "not_supported"),
        ({"guide": {}}, "guide", "invalid_value"),
        ({"guide": {"regex": "a", "choice": ["a"]}}, "guide", "invalid_value"),
        ({"guide": {"regexp": "a"}}, "guide.regexp", "invalid_value"),
        ({"guide": {"json_schema": DEEP}}, "guide.json_schema", "invalid_value"),
        ({"guide": {"regex": "a"}, "response_format": {"type": "json_object"}}, "guide", "invalid_value"),
        ({"response_format": "json"}, "response_format", "invalid_value"),
        ({"response_format": {}}, "response_format.type", "missing_required_parameter"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "invalid_value"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema",
         "invalid_value"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema",
         "missing_required_parameter"),
        (_schema(schema={}), "response_format.json_schema.name", "missing_required_parameter"),
        (_schema(name="a b"), "response_format.json_schema.name", "invalid_value"),
        (_schema(name="a", schema=[]), "response_format.json_schema.schema", "invalid_value"),
        (_schema(name="a", schema=DEEP), "response_format.json_schema.schema", "invalid_value"),
        (_schema(name="a", schema={"const": 2**64}), "response_format.json_schema.schema",
         "invalid_value"),
    ],
)  # fmt: skip
async def test_what_does_not_fit_is_refused_by_name(change: dict[str, Any], param: str, code: str) -> None:
    response, submitted = await asked(change)

    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, param, code)
    assert error["message"].startswith(param)
    assert submitted == []


async def test_a_model_that_knows_no_tools_refuses_them_and_does_without() -> None:
    async with deployment() as world:
        refused = await world.client.post(PATH, json=CHAT | {"tools": [WEATHER]})
        taken = await world.client.post(PATH, json=CHAT | {"tools": [WEATHER], "tool_choice": "none"})

    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "tools"
    assert refused.json()["error"]["code"] == "tools_not_supported"
    assert taken.status_code == 200


async def test_what_a_worker_refuses_is_a_status_of_the_stream() -> None:
    async def refuse(performance: Performance) -> None:
        performance.fail(Failure(code="invalid_guide", message="the schema is none", status=400))

    change = {"stream": True, "response_format": {"type": "json_object"}}
    async with deployment(refuse) as world:
        response = await world.client.post(PATH, json=CHAT | change)

    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert response.json()["error"]["code"] == "invalid_guide"


@pytest.mark.slow
async def test_models_say_how_they_call_tools() -> None:
    async with deployment(tool_calls="hermes") as world:
        with_tools = (await world.client.get("/v1/models/demo")).json()
    async with deployment() as world:
        without = (await world.client.get("/v1/models/demo")).json()

    assert (with_tools["tool_calls"], without["tool_calls"]) == ("hermes", None)


# ---- how calls are told ---------------------------------------------------------------------------


def saying(*pieces: str, reason: str = "stop") -> Script:
    async def script(performance: Performance) -> None:
        for piece in pieces:
            performance.say(piece)
        performance.finish(reason)

    return script


async def document(script: Script, **change: Any) -> dict[str, Any]:
    async with deployment(script, tool_calls="hermes") as world:
        response = await world.client.post(PATH, json=CHAT | {"tools": [WEATHER]} | change)
    [choice] = response.json()["choices"]
    found: dict[str, Any] = choice
    return found


async def test_a_call_is_told_as_one() -> None:
    choice = await document(saying(CALL))

    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert message["content"] is None
    [call] = message["tool_calls"]
    assert call["type"] == "function"
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Ulm"}'}


async def test_text_before_a_call_is_content_and_ids_differ() -> None:
    choice = await document(saying("Let me see.\n", CALL, "\n" + CALL))

    assert choice["message"]["content"] == "Let me see."
    assert len({call["id"] for call in choice["message"]["tool_calls"]}) == 2


async def test_an_answer_without_a_call_is_as_ever() -> None:
    choice = await document(saying("It <tool_", "> is fine. "))

    assert choice["finish_reason"] == "stop"
    assert choice["message"] == {"role": "assistant", "content": "It <tool_> is fine. ", "refusal": None}


async def test_a_call_that_was_cut_off_says_why() -> None:
    choice = await document(saying(CALL[:60], reason="length"))

    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"].startswith('{"ci')


async def test_calls_are_text_where_none_were_offered() -> None:
    changes: list[dict[str, Any]] = [{"tools": []}, {"tool_choice": "none"}]
    for change in changes:
        choice = await document(saying(CALL), **change)
        assert choice["message"]["content"] == CALL
        assert choice["finish_reason"] == "stop"


def events(text: str) -> list[tuple[str, dict[str, Any]]]:
    """The id and the body of every event of a stream."""
    found = []
    for block in text.split("\n\n"):
        if block.startswith("id: "):
            position, _, data = block.partition("\n")
            found.append((position.removeprefix("id: "), json.loads(data.removeprefix("data: "))))
    return found


async def stream(world: World, **headers: str) -> str:
    body = CHAT | {"tools": [WEATHER], "stream": True, "request_id": "told", "logprobs": False}
    response = await world.client.post(PATH, json=body, headers=headers)
    return response.text


async def test_a_stream_tells_the_name_first_and_then_the_arguments_as_they_come() -> None:
    pieces = [
        "Hm. ",
        "<tool",
        '_call>\n{"name": "get_weather", ',
        '"arguments": {"ci',
        'ty": "Ulm"}',
        "}\n</tool_call>",
    ]
    async with deployment(saying(*pieces), tool_calls="hermes") as world:
        told = [body["choices"][0] for _, body in events(await stream(world))]

    deltas = [choice["delta"] for choice in told]
    [identity] = {call["id"] for delta in deltas for call in delta.get("tool_calls", []) if "id" in call}
    assert deltas == [
        {"role": "assistant", "content": ""},
        {"content": "Hm."},
        {"tool_calls": [{"index": 0, "id": identity, "type": "function",
                         "function": {"name": "get_weather", "arguments": '{"ci'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": 'ty": "Ulm"}'}}]},
        {},
    ]  # fmt: skip
    assert [choice["finish_reason"] for choice in told] == [None, None, None, None, "tool_calls"]


async def test_a_stream_of_calls_goes_on_at_any_position_to_the_byte() -> None:
    pieces = ["Hm.", *(CALL[place : place + 7] for place in range(0, len(CALL), 7)), "\n", CALL, " Well <"]
    async with deployment(saying(*pieces), tool_calls="hermes") as world:
        whole = await stream(world)
        for position, _ in events(whole):
            behind = whole.split(f"id: {position}\n", 1)[1].partition("\n\n")[2]
            assert await stream(world, **{"Last-Event-ID": position}) == behind


async def test_each_choice_is_read_by_itself() -> None:
    async with deployment(saying("<tool_call>", CALL[11:]), tool_calls="hermes") as world:
        response = await world.client.post(PATH, json=CHAT | {"tools": [WEATHER], "n": 3})

    found = [choice["message"]["tool_calls"] for choice in response.json()["choices"]]
    assert [call["function"]["name"] for [call] in found] == ["get_weather"] * 3
    assert len({call["id"] for [call] in found}) == 3


# ---- who comes first ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (PATH, CHAT),
        ("/v1/completions", {"model": "demo", "prompt": "len:"}),
        ("/generate", {"text": "len", "streaming": False}),
    ],
)
async def test_a_priority_is_submitted(path: str, body: dict[str, Any]) -> None:
    async with deployment() as world:
        for priority in (-100, None, 100):
            await world.client.post(path, json={**body, "priority": priority})
        wrong = [await world.client.post(path, json={**body, "priority": bad}) for bad in (101, -101, 1.5)]
        submitted = [event for event in world.events("request") if isinstance(event, RequestSubmitted)]

    assert [(event.priority, event.tenant) for event in submitted] == [(-100, None), (0, None), (100, None)]
    assert {response.status_code for response in wrong} == {400}
    assert {response.json()["error"]["param"] for response in wrong} == {"priority"}


async def test_a_form_may_say_a_priority() -> None:
    async with deployment() as world:
        await world.client.post("/generate", data={"text": "len", "priority": "-7"})
        wrong = await world.client.post("/generate", data={"text": "len", "priority": "high"})
        [submitted] = world.events("request")

    assert isinstance(submitted, RequestSubmitted)
    assert submitted.priority == -7
    assert wrong.json()["error"]["message"] == "priority: expected an integer, found 'high'"


async def test_the_tenant_is_the_name_of_the_key() -> None:
    keys = [ApiKey(name="web", secret="sesame")]
    async with deployment(keys=keys) as world:
        headers = {"authorization": "Bearer sesame"}
        await world.client.post(PATH, json=CHAT, headers=headers)
        await world.client.post("/generate", json={"text": "len"}, headers=headers)
        submitted = [event for event in world.events("request") if isinstance(event, RequestSubmitted)]

    assert [event.tenant for event in submitted] == ["web", "web"]


async def test_a_full_queue_says_when_to_come_back() -> None:
    async def refuse(performance: Performance) -> None:
        performance.reject(Failure(code="queue_full", message="3 requests wait", status=429))

    asked = CHAT | {"stream": True, "request_id": "late"}
    async with deployment(refuse) as world:
        response = await world.client.post(PATH, json=asked)
        again = await world.client.post(PATH, json=asked)

    assert (response.status_code, again.status_code) == (429, 429)
    assert int(response.headers["retry-after"]) >= 1
    assert response.json()["error"]["type"] == "rate_limit_error"
    assert response.json()["error"]["code"] == "queue_full"


async def test_calls_are_read_though_the_worker_has_left() -> None:
    async with deployment(saying(CALL)) as world:
        leaving = WorkerLeaving(writer="w0", rank=0, tool_calls="hermes")
        world.server.append(world.subjects.worker(0), encode(leaving))
        await world.until(lambda: world.gateway.tool_calls is not None)
        response = await world.client.post(PATH, json=CHAT | {"tools": [WEATHER]})

    assert response.json()["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    "arguments", ["{", "", "[]", "5", '{"a": 1}}', "null", "{'a': 1}", '{"a": "\\ud800"}']
)
async def test_a_malformed_call_that_the_server_answered_with_is_accepted_back(arguments: str) -> None:
    async def call(performance: Performance) -> None:
        performance.say(CALL.replace('{"city": "Ulm"}', arguments))
        performance.finish()

    function = {"name": "get_weather", "arguments": arguments}
    made = {"id": "a", "type": "function", "function": function}
    returned = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [made]}]
    answered = {"role": "tool", "tool_call_id": "a", "content": "it rains"}
    async with deployment(call, tool_calls="hermes") as world:
        answer = await world.client.post(
            "/v1/chat/completions", json=CHAT | {"messages": [*returned, answered], "tools": [WEATHER]}
        )

    assert answer.status_code == 200


CODED = (
    "Wait.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nUlm\n</parameter>\n"
    "</function>\n</tool_call>"
)
PAIRED = "Wait.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Ulm</arg_value>\n</tool_call>"


@pytest.mark.parametrize(("written", "answer"), [("qwen3_coder", CODED), ("glm", PAIRED)])
@pytest.mark.parametrize("size", [1, 7, 500])
async def test_calls_between_tags_are_calls(written: str, answer: str, size: int) -> None:
    async def perform(performance: Performance) -> None:
        for place in range(0, len(answer), size):
            performance.say(answer[place : place + size])
        performance.finish()

    async with deployment(perform, tool_calls=written) as world:
        response = await world.client.post(PATH, json=CHAT | {"tools": [WEATHER]})

    choice = response.json()["choices"][0]
    [call] = choice["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == (
        "get_weather", {"city": "Ulm"},
    )  # fmt: skip
    assert choice["message"]["content"] == "Wait."
    assert choice["finish_reason"] == "tool_calls"
