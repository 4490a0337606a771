"""Ollama's routes: what goes on the log, the lines of an answer, and errors in its schema."""

import base64
import json
from typing import Any

import pytest

from shared.events import Failure, Guide, RequestSubmitted
from tests.gateway.media.world import png, seeing, submitted
from tests.gateway.openai.test_sdk import saying
from tests.gateway.world import Performance, Script, deployment, echo

CHAT, GENERATE = "/api/chat", "/api/generate"
MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "What does len do?"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "demo", "messages": MESSAGES},
    GENERATE: {"model": "demo", "prompt": "What does len do?"},
}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ulm"}}\n</tool_call>'


async def asked(path: str, script: Script = echo, **change: Any) -> tuple[Any, list[RequestSubmitted]]:
    async with deployment(script, tool_calls="hermes") as world:
        response = await world.client.post(path, json=BODIES[path] | change)
        found = [event for event in world.events("request") if isinstance(event, RequestSubmitted)]
    return response, found


def lines(response: Any) -> list[dict[str, Any]]:
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.splitlines()]


# ---- what goes on the log ------------------------------------------------------------------------


@pytest.mark.parametrize("path", BODIES)
async def test_options_are_parameters(path: str) -> None:
    options = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "seed": 7, "num_predict": 9,
        "stop": ["END"], "repeat_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.3,
        "num_ctx": 4096, "num_gpu": 1, "mirostat": 0, "mirostat_tau": 5, "repeat_last_n": -1,
    }  # fmt: skip
    _, [event] = await asked(path, options=options, keep_alive="5m", think=False)
    params = event.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.seed) == (
        0.5,
        0.9,
        3,
        0.1,
        7,
    )
    assert (params.max_tokens, params.stop, params.repetition_penalty) == (9, ["END"], 1.1)
    assert (params.presence_penalty, params.frequency_penalty) == (0.2, 0.3)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("form", "guide"),
    [
        ("json", Guide(json_object=True)),
        ({"type": "object"}, Guide(json_schema={"type": "object"})),
        ("", None),
    ],
)
async def test_a_format_is_a_guide(path: str, form: Any, guide: Guide | None) -> None:
    _, [event] = await asked(path, format=form)
    assert event.params.guide == guide


async def test_a_prompt_is_a_chat_and_a_raw_one_is_none() -> None:
    _, [event] = await asked(GENERATE, system="Be brief.")
    assert event.inputs.messages == [{"role": "system", "content": "Be brief."}, *MESSAGES]
    _, [event] = await asked(GENERATE, raw=True)
    assert (event.inputs.text, event.inputs.messages) == ("What does len do?", None)


async def test_a_result_belongs_to_the_call_of_its_tool() -> None:
    def call(name: str) -> dict[str, Any]:
        return {"function": {"name": name, "arguments": {"city": name}}}

    messages = [
        *MESSAGES,
        {"role": "assistant", "content": "", "tool_calls": [call("a"), call("b")]},
        {"role": "tool", "content": "of b", "tool_name": "b"},
        {"role": "tool", "content": "of a"},
    ]
    _, [event] = await asked(CHAT, messages=messages, tools=[WEATHER])
    _, called, first, second = event.inputs.messages or []
    ids = [one["id"] for one in called["tool_calls"]]
    assert [json.loads(one["function"]["arguments"]) for one in called["tool_calls"]] == [
        {"city": "a"},
        {"city": "b"},
    ]
    assert (first["tool_call_id"], second["tool_call_id"]) == (ids[1], ids[0])


@pytest.mark.parametrize("path", BODIES)
async def test_images_are_files_of_the_request(path: str) -> None:
    image = base64.b64encode(png()).decode()
    change = {"images": [image]} if path == GENERATE else {"messages": [MESSAGES[0] | {"images": [image]}]}
    async with seeing() as world:
        response = await world.client.post(path, json=BODIES[path] | change)
        assert response.status_code == 200, response.text
        event = submitted(world)
    assert [one.content_type for one in event.inputs.files] == ["image/png"]
    assert [part["type"] for part in (event.inputs.messages or [])[-1]["content"]] == ["image", "text"]


# ---- answers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "key"), [(CHAT, "message"), (GENERATE, "response")])
async def test_an_answer_is_a_line_for_each_piece(path: str, key: str) -> None:
    response, _ = await asked(path, model="demo:latest")
    *pieces, last = lines(response)
    texts = [one[key]["content"] if key == "message" else one[key] for one in pieces]
    assert texts == ["What", " does", " len", " do?"]
    assert {one["done"] for one in pieces} == {False}
    assert {one["model"] for one in [*pieces, last]} == {"demo:latest"}
    assert (last["done"], last["done_reason"]) == (True, "stop")
    assert (last["prompt_eval_count"], last["eval_count"]) == (7, 4)
    assert last["total_duration"] >= last["prompt_eval_duration"] > 0
    document, _ = await asked(path, stream=False)
    whole = document.json()
    assert (whole[key]["content"] if key == "message" else whole[key]) == "What does len do?"
    assert whole["done"]


@pytest.mark.parametrize("size", [1, 7, 200])
@pytest.mark.parametrize("is_stream", [False, True])
async def test_calls_have_their_arguments_as_objects(size: int, *, is_stream: bool) -> None:
    script = saying(f"Let me look.\n{CALL}\n{CALL}", size)
    response, _ = await asked(CHAT, script, tools=[WEATHER], stream=is_stream)
    messages = [one["message"] for one in (lines(response) if is_stream else [response.json()])]
    calls = [call for message in messages for call in message.get("tool_calls", [])]
    assert calls == [{"function": {"name": "get_weather", "arguments": {"city": "Ulm"}}}] * 2
    assert "".join(message["content"] for message in messages).strip() == "Let me look."


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_call_that_the_limit_cuts_off_is_none(*, is_stream: bool) -> None:
    async def script(performance: Performance) -> None:
        performance.say(CALL[:60])
        performance.finish("length")

    response, _ = await asked(CHAT, script, tools=[WEATHER], stream=is_stream)
    found = lines(response) if is_stream else [response.json()]
    assert all("tool_calls" not in one["message"] for one in found)
    assert found[-1]["done_reason"] == "length"


@pytest.mark.parametrize(
    ("path", "change", "key", "value"),
    [
        (GENERATE, {"prompt": None}, "response", ""),
        (GENERATE, {"prompt": ""}, "response", ""),
        (CHAT, {"messages": []}, "message", {"role": "assistant", "content": ""}),
    ],
)
async def test_without_a_question_the_model_is_said_to_be_loaded(
    path: str, change: dict[str, Any], key: str, value: Any
) -> None:
    response, events = await asked(path, **change)
    assert response.json()[key] == value
    assert (response.json()["done"], response.json()["done_reason"]) == (True, "load")
    assert events == []


@pytest.mark.parametrize("options", [{"num_predict": -2}, {"num_predict": -1}, {"repeat_last_n": 64}])
async def test_options_that_ask_for_nothing_are_accepted(options: dict[str, Any]) -> None:
    _, [event] = await asked(CHAT, options=options)
    assert event.params.max_tokens is None


# ---- models ------------------------------------------------------------------------------------------


async def test_the_model_is_listed_shown_and_loaded() -> None:
    async with deployment(tool_calls="hermes") as world:
        listed = (await world.client.get("/api/tags")).json()["models"]
        loaded = (await world.client.get("/api/ps")).json()["models"]
        shown = (await world.client.post("/api/show", json={"model": "demo:latest"})).json()
        missing = await world.client.post("/api/show", json={"model": "other"})
        unknown = await world.client.post("/api/show", json={"model": "demo", "template": "x"})
        version = (await world.client.get("/api/version")).json()
    assert [one["name"] for one in listed] == [one["name"] for one in loaded] == ["demo"]
    assert shown["capabilities"] == ["completion", "tools", "embedding"]
    assert shown["model_info"]["decoder_lm.context_length"] == 512
    assert (missing.status_code, list(missing.json())) == (404, ["error"])
    assert (unknown.status_code, "template" in unknown.json()["error"]) == (400, True)
    assert version["version"]


# ---- embeddings --------------------------------------------------------------------------------------


async def vectors(performance: Performance) -> None:
    performance.vector([float(len(performance.event.inputs.text or "")), 0.5])
    performance.finish()


@pytest.mark.parametrize(("given", "found"), [("abc", [[3.0, 0.5]]), (["a", "bb"], [[1.0, 0.5], [2.0, 0.5]])])
async def test_texts_are_embedded(given: Any, found: list[list[float]]) -> None:
    body = {"model": "demo:latest", "input": given, "keep_alive": 5, "options": {"num_ctx": 9}}
    async with deployment(vectors) as world:
        response = await world.client.post("/api/embed", json=body)
        events = [event for event in world.events("request") if isinstance(event, RequestSubmitted)]
    document = response.json()
    assert document["embeddings"] == found
    assert document["model"] == "demo:latest"
    assert document["prompt_eval_count"] == 7 * len(found)
    assert document["total_duration"] > 0
    assert {event.params.truncate_prompt_tokens for event in events} == {-1}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"options": {"temperature": 1}}, "options.temperature"),
        ({"prompt": "x"}, "prompt"),
        ({"input": 5}, "input"),
        ({"dimensions": 0}, "dimensions"),
        ({"model": "other"}, "other"),
    ],
)
async def test_a_wrong_embedding_is_one_sentence(change: dict[str, Any], says: str) -> None:
    async with deployment(vectors) as world:
        response = await world.client.post("/api/embed", json={"model": "demo", "input": "a"} | change)
    assert response.status_code in (400, 404)
    assert says in response.json()["error"]


# ---- errors ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "change", "says"),
    [
        (CHAT, {"messages": 5}, "messages"),
        (CHAT, {"prompt": "x"}, "prompt"),
        (CHAT, {"think": "much"}, "think"),
        (CHAT, {"format": "yaml"}, "format"),
        (CHAT, {"options": {"temprature": 1}}, "options.temprature"),
        (CHAT, {"options": {"mirostat": 2}}, "options.mirostat"),
        (CHAT, {"options": {"temperature": -1}}, "options.temperature: "),
        (CHAT, {"options": {"num_predict": 0}}, "options.num_predict: "),
        (GENERATE, {"raw": True, "options": {"repeat_penalty": -1}}, "options.repeat_penalty: "),
        (CHAT, {"options": {"repeat_last_n": 64, "repeat_penalty": 1.1}}, "options.repeat_last_n"),
        (
            CHAT,
            {"messages": [{"role": "tool", "content": "x"}]},
            "expected a call of a tool before its result",
        ),
        (CHAT, {"messages": [{"role": "user", "content": "x", "file": 1}]}, "messages[0].file"),
        (CHAT, {"messages": [{"role": "user", "content": "x", "images": "y"}]}, "messages[0].images"),
        (GENERATE, {"suffix": "x"}, "suffix"),
        (GENERATE, {"context": [1]}, "context"),
        (GENERATE, {"raw": True, "system": "x"}, "raw"),
        (GENERATE, {"model": "other"}, "other"),
    ],
)
async def test_an_error_is_ollamas_and_names_the_field(path: str, change: dict[str, Any], says: str) -> None:
    response, events = await asked(path, **change)
    assert response.status_code in (400, 404)
    assert list(response.json()) == ["error"]
    assert says in response.json()["error"]
    assert events == []


async def test_an_image_for_a_model_of_texts_is_refused() -> None:
    image = base64.b64encode(png()).decode()
    response, events = await asked(GENERATE, images=[image])
    assert (response.status_code, events) == (400, [])
    assert response.json()["error"].startswith("images[0]: ")


@pytest.mark.parametrize("route", ["pull", "embeddings", "blobs/sha256:00"])
async def test_other_routes_of_ollama_say_what_is_served(route: str) -> None:
    async with deployment() as world:
        response = await world.client.post(f"/api/{route}", json={})
    assert response.status_code == 404
    assert "POST /api/chat" in response.json()["error"]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_an_answer_that_fails_says_so(*, is_stream: bool) -> None:
    async def script(performance: Performance) -> None:
        if is_stream:
            performance.say("It")
        performance.fail(Failure(code="worker_lost", message="rank 0 was lost", status=503))

    response, _ = await asked(CHAT, script, stream=is_stream)
    last = lines(response)[-1] if is_stream else response.json()
    assert last == {"error": "rank 0 was lost"}
