import json
from typing import Any

import httpx
import msgspec
import openai
import pytest
from openai.types import Completion, CompletionUsage, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessageParam

from shared.events import Failure, Params, RequestSubmitted
from tests.gateway.world import CHAT, Performance, World, deployment, listening

HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What does len do?"}]


def openai_client(url: str, *, is_strict: bool = True) -> openai.AsyncOpenAI:
    """OpenAI's client in its strict mode, which refuses values that differ from its types.

    By its types no event of a completion's stream has a null `finish_reason`. OpenAI's service sends such
    events, and the strict client refuses them, too.
    """
    return openai.AsyncOpenAI(
        base_url=f"{url}/v1",
        api_key="none",
        max_retries=0,
        timeout=30,
        _strict_response_validation=is_strict,
    )


def events(response: httpx.Response) -> list[dict[str, Any] | str]:
    """The server-sent events' data."""
    assert response.headers["content-type"].startswith("text/event-stream")
    found: list[dict[str, Any] | str] = []
    for block in response.text.split("\n\n"):
        for line in block.splitlines():
            if line.startswith("data: "):
                data = line.removeprefix("data: ")
                found.append(data if data == "[DONE]" else json.loads(data))
    return found


async def submitted(world: World) -> RequestSubmitted:
    event = world.events("request")[-1]
    assert isinstance(event, RequestSubmitted)
    return event


class TestThroughOpenAIsOwnClient:
    @pytest.mark.processes
    async def test_a_chat_as_one_document(self) -> None:
        async with deployment() as world, listening(world) as url, openai_client(url) as client:
            answer = await client.chat.completions.create(model="demo", messages=HELLO)

        ChatCompletion.model_validate(answer.model_dump(), strict=True)
        assert answer.choices[0].message.content == "What does len do?"
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage == CompletionUsage(prompt_tokens=7, completion_tokens=4, total_tokens=11)
        assert answer.object == "chat.completion"

    @pytest.mark.processes
    async def test_a_chat_as_a_stream(self) -> None:
        async with deployment() as world, listening(world) as url, openai_client(url) as client:
            stream = await client.chat.completions.create(
                model="demo", messages=HELLO, stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]

        for chunk in chunks:
            ChatCompletionChunk.model_validate(chunk.model_dump(), strict=True)
        assert chunks[0].choices[0].delta.role == "assistant"
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == "What does len do?"
        assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * 5 + ["stop"]
        assert chunks[-1].choices == []
        assert chunks[-1].usage == CompletionUsage(prompt_tokens=7, completion_tokens=4, total_tokens=11)
        assert [chunk.usage for chunk in chunks[:-1]] == [None] * 6
        assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1

    @pytest.mark.processes
    async def test_a_completion_both_ways(self) -> None:
        async with deployment() as world, listening(world) as url, openai_client(url) as client:
            whole = await client.completions.create(model="demo", prompt="once upon a time")
            async with openai_client(url, is_strict=False) as lenient:
                stream = await lenient.completions.create(
                    model="demo", prompt="once upon a time", stream=True
                )
                chunks = [chunk async for chunk in stream]
            strictly = await client.completions.create(model="demo", prompt="once upon a time", stream=True)
            with pytest.raises(openai.APIResponseValidationError):  # OpenAI's stream, too
                [chunk async for chunk in strictly]

        Completion.model_validate(chunks[-1].model_dump(), strict=True)
        assert whole.choices[0].text == "once upon a time"
        assert "".join(chunk.choices[0].text for chunk in chunks) == "once upon a time"
        assert chunks[-1].choices[0].finish_reason == "stop"
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 4

    @pytest.mark.processes
    async def test_several_choices_of_several_prompts(self) -> None:
        async with deployment() as world, listening(world) as url, openai_client(url) as client:
            chat = await client.chat.completions.create(model="demo", messages=HELLO, n=3, seed=1)
            stream = await client.chat.completions.create(
                model="demo", messages=HELLO, n=2, stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
            listed = await client.completions.create(model="demo", prompt=["a b", "c"], n=2)
            tokens = await client.completions.create(model="demo", prompt=[[1, 2], [3]])

        assert [choice.message.content for choice in chat.choices] == ["What does len do?"] * 3
        assert chat.usage == CompletionUsage(prompt_tokens=7, completion_tokens=12, total_tokens=19)
        for index in (0, 1):
            said = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
            assert "".join(choice.delta.content or "" for choice in said) == "What does len do?"
        assert chunks[-1].usage == CompletionUsage(prompt_tokens=7, completion_tokens=8, total_tokens=15)
        assert [choice.text for choice in listed.choices] == ["a b", "a b", "c", "c"]
        assert [choice.index for choice in tokens.choices] == [0, 1]

    @pytest.mark.processes
    async def test_the_models(self) -> None:
        async with deployment() as world, listening(world) as url, openai_client(url) as client:
            listed = [model async for model in client.models.list()]
            one = await client.models.retrieve("demo")

        assert [model.id for model in listed] == ["demo"]
        Model.model_validate(one.model_dump(), strict=True)

    @pytest.mark.processes
    async def test_errors_are_openais_own(self) -> None:
        async def full(performance: Performance) -> None:
            performance.reject(Failure(code="overloaded", message="full", status=429))

        async def refused(performance: Performance) -> None:
            performance.fail(Failure(code="chat_template_error", message="roles must alternate", status=422))

        async with deployment(refused) as world, listening(world) as url, openai_client(url) as client:
            mine = {"request_id": "q"}
            with pytest.raises(openai.UnprocessableEntityError):
                await client.chat.completions.create(model="demo", messages=HELLO, extra_body=mine)
            with pytest.raises(openai.ConflictError):
                await client.chat.completions.create(model="demo", messages=HELLO, extra_body=mine, n=2)
            with pytest.raises(openai.NotFoundError, match="not served here"):
                await client.fine_tuning.jobs.list()
        async with deployment(full) as world, listening(world) as url, openai_client(url) as client:
            with pytest.raises(openai.NotFoundError, match="does not exist") as unknown:
                await client.chat.completions.create(model="gpt-4", messages=HELLO)
            with pytest.raises(openai.RateLimitError):
                await client.chat.completions.create(model="demo", messages=HELLO)
            with pytest.raises(openai.BadRequestError) as wrong:
                await client.chat.completions.create(model="demo", messages=HELLO, temperature=-1)

        assert unknown.value.code == "model_not_found"
        assert wrong.value.param == "temperature"

    @pytest.mark.processes
    async def test_a_stream_that_breaks_raises(self) -> None:
        async def breaks(performance: Performance) -> None:
            performance.say("begun")
            performance.fail(Failure(code="worker_failed", message="out of memory", status=500))

        async with deployment(breaks) as world, listening(world) as url, openai_client(url) as client:
            stream = await client.chat.completions.create(model="demo", messages=HELLO, stream=True)
            with pytest.raises(openai.APIError, match="out of memory"):
                async for _ in stream:
                    pass


def _parts(*parts: object) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}]}


async def test_the_role_comes_first_and_done_last() -> None:
    async with deployment() as world:
        response = await world.client.post("/v1/chat/completions", json=CHAT | {"stream": True})

    found = events(response)
    assert found[-1] == "[DONE]"
    assert isinstance(found[0], dict)
    assert found[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all("usage" not in event for event in found if isinstance(event, dict))


async def test_the_ids_of_events_say_how_far_the_stream_is_behind_them() -> None:
    async def held_back(performance: Performance) -> None:
        performance.say("a")
        performance.say("")  # tokens without text
        performance.say("b")
        performance.finish()

    async with deployment(held_back) as world:
        body = CHAT | {"stream": True, "stream_options": {"include_usage": True}}
        response = await world.client.post("/v1/chat/completions", json=body)

    told = [line for line in response.text.splitlines() if line.startswith("id:")]
    assert told == ["id: b", "id: 0", "id: 2", "id: e", "id: end"]


async def test_an_answer_without_text_is_still_an_answer() -> None:
    async def nothing(performance: Performance) -> None:
        performance.finish("length")

    async with deployment(nothing) as world:
        stream = await world.client.post("/v1/chat/completions", json=CHAT | {"stream": True})
        whole = await world.client.post("/v1/chat/completions", json=CHAT)

    found = [event for event in events(stream) if isinstance(event, dict)]
    assert found[0]["choices"][0]["delta"]["role"] == "assistant"
    assert found[-1]["choices"][0]["finish_reason"] == "length"
    assert whole.json()["choices"][0]["message"]["content"] == ""


async def test_a_broken_stream_ends_without_done() -> None:
    async def breaks(performance: Performance) -> None:
        performance.say("begun")
        performance.fail(Failure(code="worker_failed", message="out of memory", status=500))

    async with deployment(breaks) as world:
        response = await world.client.post(
            "/v1/completions", json={"model": "demo", "prompt": "x", "stream": True}
        )

    last = events(response)[-1]
    assert isinstance(last, dict)
    assert last["error"]["code"] == "worker_failed"


async def test_parameters_reach_the_event() -> None:
    async with deployment() as world:
        body = CHAT | {
            "max_tokens": 5, "max_completion_tokens": 6, "temperature": 0.5, "top_p": 0.25, "top_k": 4,
            "seed": 3, "stop": ["a", "b"], "ignore_eos": True, "user": "me", "metadata": {"a": "b"}, "n": 1,
            "tools": None, "frequency_penalty": 0, "response_format": {"type": "text"}, "new": None,
        }  # fmt: skip
        response = await world.client.post("/v1/chat/completions", json=body)
        params = (await submitted(world)).params

    assert response.status_code == 200
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (6, 0.5, 0.25, 4)
    assert (params.seed, params.stop, params.ignore_eos) == (3, ["a", "b"], True)


CHOOSING: dict[str, Any] = {
    "min_p": 0.1,
    "repetition_penalty": 1.2,
    "presence_penalty": -0.5,
    "frequency_penalty": 1,
    "logit_bias": {"7": 1, "30": -100},
    "bad_words": ["no", [4, 5]],
    "min_tokens": 2,
    "stop_token_ids": [8],
}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_how_tokens_are_chosen_reaches_the_event(path: str) -> None:
    body = CHAT if "chat" in path else {"model": "demo", "prompt": "hi"}
    async with deployment() as world:
        response = await world.client.post(path, json=body | CHOOSING)
        params = (await submitted(world)).params

    assert response.status_code == 200
    assert msgspec.to_builtins(params) == CHOOSING


async def test_what_chooses_nothing_is_as_if_it_had_not_been_said() -> None:
    nothing = {"presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "stop_token_ids": []}
    async with deployment() as world:
        await world.client.post("/v1/chat/completions", json=CHAT | nothing | {"min_p": None})
        params = (await submitted(world)).params

    assert params == Params()


async def test_a_chat_goes_on_the_log_as_it_was_written() -> None:
    messages = [
        {"role": "system", "content": "Be brief.", "name": "s"},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": None},
        {"role": "user", "content": "Again"},
    ]
    async with deployment() as world:
        await world.client.post("/v1/chat/completions", json={"model": "demo", "messages": messages})
        inputs = (await submitted(world)).inputs

    assert inputs.messages == messages


@pytest.mark.parametrize(
    ("prompt", "text", "token_ids"),
    [
        ("raw", "raw", None),
        (["raw"], "raw", None),
        ([1, 2], None, [1, 2]),
        ([[1, 2]], None, [1, 2]),
        ("", "", None),
    ],
)
async def test_a_prompt_is_raw_text_or_token_ids(
    prompt: object, text: str | None, token_ids: list[int] | None
) -> None:
    async with deployment() as world:
        response = await world.client.post("/v1/completions", json={"model": "demo", "prompt": prompt})
        inputs = (await submitted(world)).inputs

    assert response.status_code == 200
    assert (inputs.text, inputs.token_ids, inputs.chat) == (text, token_ids, False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "param", "code"),
    [
        ({"n": 0}, "n", "invalid_value"),
        ({"n": "2"}, "n", "invalid_value"),
        ({"n": 129}, "n", "invalid_value"),
        ({"n": 2, "request_id": "x" * 63}, None, "invalid_request_id"),
        ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
        ({"logprobs": 1}, "logprobs", "invalid_value"),
        ({"max_tokens": 1_000_001}, "max_tokens", "invalid_value"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "invalid_value"),
        ({"max_completion_tokens": 10**9}, "max_completion_tokens", "invalid_value"),
        ({"messages": [{"role": "user", "content": "x"}] * 2049}, "messages", "invalid_value"),
        ({"timeout_s": 0}, "timeout_s", "invalid_value"),
        ({"timeout_s": 1e6}, "timeout_s", "invalid_value"),
        ({"timeout_s": "1"}, "timeout_s", "invalid_value"),
        ({"functions": [{"name": "f"}]}, "functions", "not_supported"),
        ({"presence_penalty": 2.5}, "presence_penalty", "invalid_value"),
        ({"frequency_penalty": "much"}, "frequency_penalty", "invalid_value"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "invalid_value"),
        ({"logit_bias": [5]}, "logit_bias", "invalid_value"),
        ({"repetition_penalty": 0}, "repetition_penalty", "invalid_value"),
        ({"bad_words": ["a", [-1]]}, "bad_words[1][0]", "invalid_value"),
        ({"bad_words": "a"}, "bad_words", "invalid_value"),
        ({"min_tokens": -1}, "min_tokens", "invalid_value"),
        ({"min_tokens": 6, "max_tokens": 5}, "min_tokens", "invalid_value"),
        ({"stop_token_ids": [1, "x"]}, "stop_token_ids[1]", "invalid_value"),
        ({"temperature": "hot"}, "temperature", "invalid_value"),
        ({"temperature": 1e9}, "temperature", "invalid_value"),
        ({"top_p": 0}, "top_p", "invalid_value"),
        ({"top_k": 1.5}, "top_k", "invalid_value"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"max_tokens": True}, "max_tokens", "invalid_value"),
        ({"seed": 2**64}, "seed", "invalid_value"),
        ({"stop": 5}, "stop", "invalid_value"),
        ({"stop": [1]}, "stop[0]", "invalid_value"),
        ({"stop": ["x"] * 17}, "stop", "invalid_value"),
        ({"stream": "yes"}, "stream", "invalid_value"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
        ({"model": None}, "model", "invalid_value"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": "hi"}, "messages", "invalid_value"),
        ({"messages": ["hi"]}, "messages[0]", "invalid_value"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role", "invalid_value"),
        ({"messages": [{"role": 5, "content": "hi"}]}, "messages[0].role", "invalid_value"),
        ({"messages": [{"role": "wizard", "content": "hi"}]}, "messages[0].role", "invalid_value"),
        ({"messages": [{"role": ["user"], "content": "hi"}]}, "messages[0].role", "invalid_value"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "invalid_value"),
        ({"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage", "invalid_value"),
        ({"model": "x" * 257}, "model", "invalid_value"),
        (_parts({"type": "image_url"}), "messages[0].content[0].image_url", "unsupported_modality"),
        (_parts({"type": "text"}), "messages[0].content[0].text", "invalid_value"),
        (_parts("text"), "messages[0].content[0]", "invalid_value"),
        ({"request_id": "a.b"}, None, "invalid_request_id"),
    ],
)  # fmt: skip
async def test_a_wrong_chat_is_refused_by_name(change: dict[str, Any], param: str | None, code: str) -> None:
    async with deployment() as world:
        response = await world.client.post("/v1/chat/completions", json=CHAT | change)
        submissions = world.events("request")

    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["code"]) == (param, code)
    assert submissions == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_tokens": 0}, "max_tokens: expected an integer >= 1, found 0"),
        ({"max_tokens": "many"}, "max_tokens: expected an integer, found 'many'"),
        ({"temperature": 100.5}, "temperature: expected a number <= 100, found 100.5"),
        ({"temperature": 10**400}, "temperature: expected a number, found an integer beyond 64 bits"),
        ({"stop": ["x"] * 17}, "stop: expected an array of at most 16 items, found an array of 17 items"),
        ({"stream": "yes"}, "stream: expected true or false, found 'yes'"),
        ({"messages": []}, "messages: expected an array of at least 1 item, found an empty array"),
        ({"messages": [{"role": "wizard", "content": "hi"}]},
         "messages[0].role: expected one of system, developer, user, assistant, tool, function, found 'wizard'"),  # noqa: E501
        ({"messages": [{"role": "user", "content": 5}]},
         "messages[0].content: expected a string or an array of parts, found 5"),
        ({"n": 200}, "n: expected at most 128 answers of one request, found 200"),
        ({"max_completion_tokens": 0}, "max_completion_tokens: expected an integer >= 1, found 0"),
        ({"min_p": 1.5}, "min_p: expected a number <= 1, found 1.5"),
        ({"logit_bias": {"5": "much"}},
         "logit_bias: expected numbers from -100 to 100, found 'much' for token 5"),
        ({"function_call": {"name": "f"}},
         'function_call: an object is not supported yet; leave it out, or send "none" or "auto"'),
        ({"model": "gpt-4"}, "the model 'gpt-4' does not exist here; this deployment serves 'demo'"),
    ],
)  # fmt: skip
async def test_an_error_says_what_was_expected_and_found(change: dict[str, Any], message: str) -> None:
    async with deployment() as world:
        response = await world.client.post("/v1/chat/completions", content=json.dumps(CHAT | change))

    assert response.json()["error"]["message"] == message


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool", "function"])
async def test_every_role_of_openais_is_taken(role: str) -> None:
    messages = [{"role": role, "content": "hi"}]
    async with deployment() as world:
        response = await world.client.post("/v1/chat/completions", json=CHAT | {"messages": messages})

    assert response.status_code == 200


@pytest.mark.parametrize("missing", ["model", "messages"])
async def test_a_missing_parameter_is_refused_by_name(missing: str) -> None:
    async with deployment() as world:
        body = {name: value for name, value in CHAT.items() if name != missing}
        response = await world.client.post("/v1/chat/completions", json=body)

    assert response.status_code == 400
    assert response.json()["error"]["param"] == missing
    assert response.json()["error"]["code"] == "missing_required_parameter"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "param", "code"),
    [
        ({"prompt": ["a"] * 129}, "prompt", "invalid_value"),
        ({"prompt": ["a"] * 65, "n": 2}, "prompt", "invalid_value"),
        ({"prompt": [[1], []]}, "prompt", "invalid_value"),
        ({"prompt": [[1], [2.5]]}, "prompt", "invalid_value"),
        ({"prompt": ["a", 1]}, "prompt", "invalid_value"),
        ({"prompt": {"a": 1}}, "prompt", "invalid_value"),
        ({"prompt": []}, "prompt", "invalid_value"),
        ({"prompt": 5}, "prompt", "invalid_value"),
        ({"prompt": [-1]}, "prompt", "invalid_value"),
        ({"prompt": [2**40]}, "prompt", "invalid_value"),
        ({"prompt": None}, "prompt", "invalid_value"),
        ({"prompt": [1, "x"]}, "prompt", "invalid_value"),
        ({"echo": "yes"}, "echo", "invalid_value"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"max_tokens": 0, "echo": False}, "max_tokens", "invalid_value"),
        ({"suffix": "x"}, "suffix", "not_supported"),
        ({"best_of": 3}, "best_of", "not_supported"),
        ({"best_of": 1, "n": 2}, "best_of", "not_supported"),
        ({"logprobs": 21}, "logprobs", "invalid_value"),
        ({"logprobs": True}, "logprobs", "invalid_value"),
    ],
)
async def test_a_wrong_completion_is_refused_by_name(change: dict[str, Any], param: str, code: str) -> None:
    async with deployment() as world:
        response = await world.client.post("/v1/completions", json={"model": "demo", "prompt": "x"} | change)

    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["code"]) == (param, code)


async def test_the_answers_id_is_the_requests() -> None:
    async with deployment() as world:
        response = await world.client.post("/v1/chat/completions", json=CHAT)
        event = await submitted(world)
        chosen = await world.client.post("/v1/chat/completions", json=CHAT | {"request_id": "mine"})

    assert response.json()["id"] == event.request_id == response.headers["x-request-id"]
    assert response.json()["id"].startswith("chatcmpl-")
    assert chosen.json()["id"] == "mine"


async def test_the_schema_of_the_routes_is_published() -> None:
    async with deployment() as world:
        paths = (await world.client.get("/openapi.json")).json()["paths"]

    assert {"/generate", "/v1/chat/completions", "/v1/completions", "/health/ready"} <= set(paths)
    body = paths["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body["required"] == ["model", "messages"]
    assert "include_usage" in json.dumps(body["properties"]["stream_options"])
    assert "$ref" not in json.dumps(body)


@pytest.mark.parametrize(
    ("path", "body", "param", "advice"),
    [
        ("/v1/chat/completions", CHAT | {"system": "Be nice."}, "system", "with the role 'system'"),
        ("/v1/chat/completions", {"model": "demo", "prompt": "x"}, "messages", "POST /v1/completions takes"),
        (
            "/v1/completions",
            {"model": "demo", "messages": [{"role": "user", "content": "x"}]},
            "prompt",
            "POST /v1/chat/completions takes",
        ),
    ],
)
async def test_a_question_in_the_words_of_another_api_is_told_where_it_belongs(
    path: str, body: dict[str, Any], param: str, advice: str
) -> None:
    async with deployment() as world:
        response = await world.client.post(path, json=body)

    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert advice in error["message"]
