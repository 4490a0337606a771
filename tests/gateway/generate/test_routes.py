import asyncio
import json
from base64 import b64decode
from dataclasses import replace
from typing import Any

import httpx
import msgspec
import pytest

from shared.events import Failure, LikelyToken, OutputChunk, RequestSubmitted, TokenLogprobs
from tests.gateway.world import SERVED, Performance, deployment, echo
from tests.hostile import NO_TOKENS

SPEAKER = replace(
    SERVED, outputs=("text", "audio"), media={"audio": {"sample_rate": 24_000, "num_channels": 1}}
)


def lines(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.splitlines()]


def text_of(chunks: list[dict[str, Any]]) -> str:
    return b"".join(b64decode(chunk["data"]) for chunk in chunks if chunk["modality"] == "text").decode()


async def test_a_form_streams_ndjson_by_default() -> None:
    async with deployment() as world:
        response = await world.client.post("/generate", files={"text": (None, "größer als 🎼 drei")})

    chunks = lines(response)
    assert text_of(chunks) == "größer als 🎼 drei"
    assert [chunk["metadata"].get("index") for chunk in chunks] == [0, 1, 2, 3, None]
    assert chunks[0] == {
        "modality": "text",
        "data": "Z3LDtsOfZXI=",
        "metadata": {"index": 0, "token_ids": [0]},
    }
    assert chunks[-1]["metadata"] == {
        "finish_reason": "stop",
        "usage": {"prompt_tokens": 7, "completion_tokens": 4, "total_tokens": 11},
        "durability": "process",
    }


async def test_a_json_body_is_the_same_request() -> None:
    async with deployment() as world:
        body = {"text": "one two", "streaming": False, "request_id": "mine", "output_modalities": "text"}
        response = await world.client.post("/generate", json=body)

    assert response.status_code == 200
    document = response.json()
    assert document["request_id"] == "mine"
    [entry] = document["outputs"]["text"]
    assert b64decode(entry["data"]) == b"one two"
    assert entry["metadata"]["token_ids"] == [0, 1]
    assert entry["metadata"]["finish_reason"] == "stop"
    assert response.headers["x-request-id"] == "mine"


@pytest.mark.parametrize("says", [True, False])
@pytest.mark.parametrize("sounds", [True, False])
async def test_a_document_has_the_modalities_that_were_put_out_and_says_once_how_it_ended(
    says: bool, sounds: bool
) -> None:
    async def perform(performance: Performance) -> None:
        for _ in range(2 * sounds):
            performance.sound(b"\0\0", track="speech")
        if says:
            performance.say("Hello")
        performance.finish("length")

    async with deployment(perform, served=SPEAKER) as world:
        response = await world.client.post("/generate", json={"text": "Hi", "streaming": False})

    outputs = response.json()["outputs"]
    assert list(outputs) == ["text"] * (says or not sounds) + ["audio"] * sounds
    assert [len(entries) for entries in outputs.values()] == [1] * (says or not sounds) + [2] * sounds
    ends = [
        (modality, place, entry["metadata"]["finish_reason"], entry["metadata"]["usage"]["total_tokens"])
        for modality, entries in outputs.items()
        for place, entry in enumerate(entries)
        if {"finish_reason", "usage"} & entry["metadata"].keys()
    ]
    assert ends == [("audio", 1, "length", 7) if sounds and not says else ("text", 0, "length", 7 + says)]
    for entry in outputs.get("audio", ()):
        assert entry["metadata"]["sample_rate"] == 24_000


async def test_an_urlencoded_form_is_read_and_json_that_is_declared_as_one_is_not() -> None:
    async with deployment() as world:
        form = await world.client.post("/generate", data={"text": "a b", "streaming": "false"})
        content = b'{"text": "a b", "streaming": false}'
        kind = {"content-type": "application/x-www-form-urlencoded"}
        bare = await world.client.post("/generate", content=content, headers=kind)

    assert form.status_code == 200
    assert (bare.status_code, bare.json()["error"]["code"]) == (415, "unsupported_media_type")
    assert "-H 'content-type: application/json'" in bare.json()["error"]["message"]


@pytest.mark.parametrize(
    "body", [{"data": {"text": "hi", "chat": "false"}}, {"json": {"text": "hi", "chat": False}}]
)
async def test_without_chat_the_text_is_a_raw_prompt(body: dict[str, Any]) -> None:
    async with deployment() as world:
        response = await world.client.post("/generate", **body)
        [event] = world.events("request")

    assert response.status_code == 200
    assert isinstance(event, RequestSubmitted)
    assert (event.inputs.text, event.inputs.chat) == ("hi", False)


@pytest.mark.parametrize("name", ["data", "json"])
async def test_messages_and_tokens_stand_in_the_place_of_a_text(name: str) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a b"}]
    async with deployment() as world:
        for field, value in (("messages", messages), ("token_ids", [1, 2])):
            body: Any = {field: json.dumps(value) if name == "data" else value}
            response = await world.client.post("/generate", **{name: body})
            assert response.status_code == 200, response.text
        chat, tokens = world.events("request")

    assert isinstance(chat, RequestSubmitted)
    assert isinstance(tokens, RequestSubmitted)
    assert (chat.inputs.messages, chat.inputs.text, chat.inputs.chat) == (messages, None, True)
    assert (tokens.inputs.token_ids, tokens.inputs.chat) == ([1, 2], False)


@pytest.mark.parametrize(
    ("body", "param", "hint"),
    [
        ({"messages": "hi"}, "messages", "messages is not JSON"),
        ({"messages": ""}, "messages", "messages is empty: expected JSON"),
        ({"messages": {}}, "messages", "expected an array, found an object"),
        ({"messages": []}, "messages", "expected an array of at least 1 item, found an empty array"),
        ({"messages": [{"role": "pirate"}]}, "messages[0].role", "expected one of system"),
        ({"token_ids": [1, -1]}, "token_ids[1]", "expected an integer >= 0, found -1"),
        ({"token_ids": [1], "text": "hi"}, "token_ids", "expected one of text, messages, token_ids"),
    ],
)
async def test_what_is_asked_is_one_thing_and_of_its_type(
    body: dict[str, Any], param: str, hint: str
) -> None:
    async with deployment() as world:
        response = await world.client.post("/generate", json=body)

    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert hint in error["message"]


async def test_log_probabilities_stand_beside_their_tokens_and_an_echos_are_the_prompts() -> None:
    def of(id: int, logprob: float | None) -> TokenLogprobs:
        top = [] if logprob is None else [LikelyToken(id=9, token=b"\xff", logprob=-0.25)]
        return TokenLogprobs(id=id, token=b"a", logprob=logprob, top=top)

    async def script(performance: Performance) -> None:
        echoed = msgspec.structs.replace(
            OutputChunk(writer="w0", attempt=1, text="hi ", metadata={"echo": True, "token_ids": [7]}),
            logprobs=[of(7, None)],
        )
        answered = OutputChunk(
            writer="w0", attempt=1, index=1, text="a", text_offset=3, token_ids=[8], logprobs=[of(8, -0.5)]
        )
        for chunk in (echoed, answered):
            performance.transcript.fold(chunk)
            performance.output(chunk)
        performance.finish()

    async with deployment(script) as world:
        body = {"text": "hi", "model_kwargs": {"logprobs": 1, "echo": True}}
        streamed = await world.client.post("/generate", json=body)
        document = await world.client.post("/generate", json={**body, "streaming": False})
        event, _ = world.events("request")

    assert isinstance(event, RequestSubmitted)
    assert (event.params.logprobs, event.params.echo) == (1, True)
    of_prompt = [{"id": 7, "token": "YQ=="}]
    of_answer = [
        {"id": 8, "token": "YQ==", "logprob": -0.5, "top": [{"id": 9, "token": "/w==", "logprob": -0.25}]}
    ]
    first, second, _ = lines(streamed)
    assert first["metadata"] == {"index": 0, "token_ids": [7], "logprobs": of_prompt, "echo": True}
    assert second["metadata"] == {"index": 1, "token_ids": [8], "logprobs": of_answer}
    [entry] = document.json()["outputs"]["text"]
    assert b64decode(entry["data"]) == b"hi a"
    ends = ("usage", "finish_reason", "durability")
    told = {name: entry["metadata"][name] for name in entry["metadata"] if name not in ends}
    assert told == {
        "prompt_token_ids": [7], "prompt_logprobs": of_prompt, "token_ids": [8], "logprobs": of_answer,
    }  # fmt: skip


async def test_the_event_holds_the_request_as_one_user_message() -> None:
    kwargs = {"temperature": 0, "top_p": 0.5, "top_k": 3, "seed": -4, "max_output_tokens": 9, "stop": "x"}
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with deployment() as world:
        fields = {"text": "hi", "model_kwargs": json.dumps(kwargs), "model": "demo"}
        await world.client.post("/generate", data=fields, headers={"traceparent": trace})
        [event] = world.events("request")

    assert isinstance(event, RequestSubmitted)
    assert (event.inputs.text, event.inputs.chat) == ("hi", True)
    assert event.params.max_tokens == 9
    assert (event.params.temperature, event.params.top_p, event.params.top_k) == (0, 0.5, 3)
    assert (event.params.seed, event.params.stop) == (-4, ["x"])
    assert (event.origin, event.writer, event.number, event.trace) == ("g-test", "g-test", 1, trace)


async def test_how_tokens_are_chosen_is_said_in_model_kwargs() -> None:
    kwargs = {
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "presence_penalty": -0.5,
        "frequency_penalty": 1,
        "logit_bias": {"7": 1, "30": -100},
        "bad_words": ["no", [4, 5]],
        "min_tokens": 2,
        "stop_token_ids": [8],
    }
    async with deployment() as world:
        await world.client.post("/generate", data={"text": "hi", "model_kwargs": json.dumps(kwargs)})
        await world.client.post("/generate", json={"text": "hi", "model_kwargs": kwargs})
        events = world.events("request")

    for event in events:
        assert isinstance(event, RequestSubmitted)
        assert msgspec.to_builtins(event.params) == kwargs
    assert len(events) == 2


@pytest.mark.parametrize(
    ("fields", "param", "hint"),
    [
        ({"model_kwargs": '{"temprature": 1}'}, "model_kwargs.temprature", "did you mean 'temperature'"),
        ({"model_kwargs": '{"max_tokns": 1}'}, "model_kwargs.max_tokns", "did you mean 'max_tokens'"),
        ({"model_kwargs": '{"zzz": 1}'}, "model_kwargs.zzz", "expected one of max_tokens"),
        (
            {"model_kwargs": '{"temperature": "hot"}'},
            "model_kwargs.temperature",
            "expected a number, found 'hot'",
        ),
        (
            {"model_kwargs": '{"temperature": -1}'},
            "model_kwargs.temperature",
            "expected a number >= 0, found -1",
        ),
        (
            {"model_kwargs": '{"max_tokens": 0}'},
            "model_kwargs.max_tokens",
            "expected an integer >= 1, found 0",
        ),
        ({"model_kwargs": '{"max_tokens": 1, "max_new_tokens": 2}'}, "model_kwargs", "expected one limit"),
        ({"model_kwargs": '{"logit_bias": {"5": 101}}'}, "model_kwargs.logit_bias", "found 101 for token 5"),
        ({"model_kwargs": '{"min_p": 2}'}, "model_kwargs.min_p", "expected a number <= 1, found 2"),
        ({"model_kwargs": '{"stop": [""]}'}, "model_kwargs.stop[0]", "at least 1 character"),
        ({"model_kwargs": "{broken"}, "model_kwargs", "not JSON"),
        ({"model_kwargs": "[1]"}, "model_kwargs", "object"),
        ({"streaming": "perhaps"}, "streaming", "true or false, found 'perhaps'"),
        ({"chat": "perhaps"}, "chat", "true or false, found 'perhaps'"),
        ({"output_modalities": "text,audio"}, "output_modalities", "knows text, embedding, found 'audio'"),
        ({"input_modalities": "image"}, "input_modalities", "image"),
        ({"temperature": "1"}, "temperature", "model_kwargs.temperature"),
        ({"txt": "1"}, "txt", "did you mean 'text'"),
    ],
)
async def test_a_wrong_field_is_refused_by_name(fields: dict[str, str], param: str, hint: str) -> None:
    async with deployment() as world:
        response = await world.client.post("/generate", data={"text": "hi", **fields})

    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert hint in error["message"]
    assert error["type"] == "invalid_request_error"


async def test_a_missing_text_is_refused() -> None:
    async with deployment() as world:
        response = await world.client.post("/generate", json={})

    assert response.status_code == 400
    assert response.json()["error"]["code"] == "missing_required_parameter"


async def test_files_are_refused_by_a_text_model() -> None:
    async with deployment() as world:
        files = {"files": ("cat.png", b"\x89PNG", "image/png")}
        response = await world.client.post("/generate", data={"text": "what is it?"}, files=files)
        empty = await world.client.post("/generate", data={"text": "hi", "files": ""})

    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["code"]) == ("files[0]", "unsupported_modality")
    assert "cat.png" in error["message"]
    assert empty.status_code == 200


async def test_a_rejection_is_a_proper_status_also_for_a_stream() -> None:
    async def too_long(performance: Performance) -> None:
        performance.reject(Failure(code="context_length_exceeded", message="too long", status=400))

    async with deployment(too_long) as world:
        response = await world.client.post("/generate", data={"text": "hi"})

    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"


async def test_a_failure_in_the_middle_is_the_last_line() -> None:
    async def breaks(performance: Performance) -> None:
        performance.say("begun")
        performance.fail(Failure(code="worker_failed", message="out of memory", status=500))

    async with deployment(breaks) as world:
        response = await world.client.post("/generate", data={"text": "hi"})
        document = await world.client.post("/generate", data={"text": "hi", "streaming": "false"})

    chunks = lines(response)
    assert text_of(chunks) == "begun"
    assert chunks[-1]["modality"] == "error"
    assert chunks[-1]["metadata"] == {"status": 500, "code": "worker_failed", "message": "out of memory"}
    assert document.status_code == 500
    assert document.json()["error"]["code"] == "worker_failed"


async def test_64_clients_at_once_each_get_their_own_answer() -> None:
    async with deployment() as world:

        async def ask(number: int) -> str:
            text = " ".join(f"word-{number}-{position}" for position in range(20))
            answer = text_of(lines(await world.client.post("/generate", data={"text": text})))
            assert answer == text
            return answer

        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(ask(number)) for number in range(64)]

    assert len({task.result() for task in asked}) == 64


async def test_the_same_id_and_body_attaches_and_executes_once() -> None:
    async with deployment() as world:
        fields = {"text": "one two three", "request_id": "twice"}
        first = await world.client.post("/generate", data=fields)
        again = await world.client.post("/generate", data=fields)
        submissions = world.events("request")

    assert lines(again) == lines(first)
    assert len(submissions) == 1


async def test_the_same_id_while_it_runs_attaches_to_what_was_said() -> None:
    release = asyncio.Event()

    async def slowly(performance: Performance) -> None:
        performance.say("first ")
        await release.wait()
        performance.say("second")
        performance.finish()

    async with deployment(slowly) as world:
        fields = {"text": "hi", "request_id": "twice"}
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(world.client.post("/generate", data=fields))
            second = tasks.create_task(world.client.post("/generate", data=fields))
            await world.performance()
            release.set()
        submissions = world.events("request")

    assert text_of(lines(first.result())) == text_of(lines(second.result())) == "first second"
    assert len(submissions) == 1


async def test_the_same_id_with_another_body_is_a_conflict() -> None:
    async with deployment() as world:
        await world.client.post("/generate", data={"text": "one", "request_id": "twice"})
        response = await world.client.post("/generate", data={"text": "two", "request_id": "twice"})

    assert response.status_code == 409
    error = response.json()["error"]
    assert (error["code"], error["type"]) == ("request_id_conflict", "conflict_error")


async def test_a_request_that_was_submitted_over_nats_can_be_attached_to() -> None:
    async with deployment() as world:
        untagged = b'{"model": "demo", "inputs": {"text": "a b"}, "request_id": "x"}'
        world.server.append(world.subjects.request("x"), untagged)
        response = await world.client.post("/generate", data={"text": "a b", "request_id": "x"})

    assert text_of(lines(response)) == "a b"


async def test_an_id_taken_by_a_malformed_message_is_a_conflict() -> None:
    async with deployment() as world:
        world.server.append(world.subjects.request("x"), b"nonsense")
        response = await world.client.post("/generate", data={"text": "a", "request_id": "x"})

    assert response.status_code == 409


async def test_a_rejection_of_a_stranger_under_our_id_does_not_end_our_answer() -> None:
    async def pestered(performance: Performance) -> None:
        conflict = Failure(code="request_id_conflict", message="taken", status=409)
        performance.reject(conflict, submission_seq=performance.seq + 1)
        await echo(performance)

    async with deployment(pestered) as world:
        response = await world.client.post("/generate", data={"text": "a b", "request_id": "x"})

    assert text_of(lines(response)) == "a b"


@pytest.mark.parametrize("request_id", [text for text in NO_TOKENS.values() if text])
async def test_an_id_that_is_no_token_is_refused(request_id: str) -> None:
    async with deployment() as world:
        response = await world.client.post("/generate", json={"text": "a", "request_id": request_id})

    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_request_id"
