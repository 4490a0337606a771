"""A real deployment through OpenAI's own client in strict mode, and each answer against its schema."""

import asyncio
import itertools
import math
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from shared.events import RequestCancelled, RequestFailed, RequestSubmitted, WalkStopped
from tests.e2e import clients
from tests.e2e.deploy import Running
from tests.gateway.openai_schema import check

HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What does len do?"}]
LEN = "Return the number of items in a container."


@asynccontextmanager
async def client(running: Running, *, is_strict: bool = True) -> AsyncGenerator[openai.AsyncOpenAI, None]:
    async with openai.AsyncOpenAI(
        base_url=f"{running.url}/v1",
        api_key="none",
        max_retries=0,
        timeout=clients.PATIENCE_S,
        _strict_response_validation=is_strict,
    ) as found:
        yield found


async def post(running: Running, path: str, body: dict[str, Any]) -> Any:
    """A response document, validated against OpenAI's schema."""
    async with clients.http(running) as http:
        http.event_hooks = {"response": [check.check_read]}
        return (await http.post(path, json={"model": "demo", **body})).json()


async def stream(running: Running, path: str, body: dict[str, Any]) -> None:
    """A stream, each event validated against OpenAI's schema."""
    async with clients.http(running) as http:
        http.event_hooks = {"response": [check.check_read]}
        response = await http.post(path, json={"model": "demo", "stream": True, **body})
    assert response.text.endswith("data: [DONE]\n\n")


async def test_several_answers_to_one_chat(deployment: Running) -> None:
    async with client(deployment) as ask:
        greedy = await ask.chat.completions.create(model="demo", messages=HELLO, n=3, temperature=0)
        sampled = [
            await ask.chat.completions.create(
                model="demo", messages=[{"role": "user", "content": "x"}], n=4, temperature=20, seed=7,
                max_tokens=12, extra_body={"ignore_eos": True},
            )
            for _ in range(2)
        ]  # fmt: skip
        one = await ask.chat.completions.create(model="demo", messages=HELLO, temperature=0)

    assert [choice.message.content for choice in greedy.choices] == [LEN] * 3
    assert one.usage is not None
    assert greedy.usage is not None
    assert greedy.usage.prompt_tokens == one.usage.prompt_tokens
    assert greedy.usage.completion_tokens == 3 * one.usage.completion_tokens
    first, again = ([choice.message.content for choice in answer.choices] for answer in sampled)
    assert len(set(first)) == 4  # of the same seed, and apart
    assert first == again


async def test_how_tokens_are_chosen_can_be_said(deployment: Running) -> None:
    asked: dict[str, Any] = {"model": "demo", "messages": HELLO, "temperature": 0}
    async with client(deployment) as ask:

        async def said(**how: Any) -> tuple[str, str]:
            [choice] = (await ask.chat.completions.create(**asked, **how)).choices
            return choice.message.content or "", choice.finish_reason

        native: dict[str, Any] = {"text": "What does len do?", "streaming": False}
        async with clients.http(deployment) as http:
            document = (await http.post("/generate", json=native)).json()
        ids = document["outputs"]["text"][0]["metadata"]["token_ids"]

        assert await said() == (LEN, "stop")
        assert await said(presence_penalty=0, frequency_penalty=0, logit_bias={}) == (LEN, "stop")
        assert await said(logit_bias={str(ids[3]): -100}) != (LEN, "stop")
        assert await said(logit_bias={str(ids[0]): 100}, max_tokens=4) == ("Return" * 4, "length")
        assert await said(frequency_penalty=2, presence_penalty=2, extra_body={"repetition_penalty": 5}) != (
            LEN,
            "stop",
        )
        assert await said(extra_body={"stop_token_ids": [ids[2]]}) == ("Return the", "stop")
        assert "number" not in (await said(extra_body={"bad_words": ["number"]}))[0]
        longer, _ = await said(extra_body={"min_tokens": 40}, max_tokens=40)
        assert longer.startswith(LEN)
        assert len(longer) > len(LEN)
        with pytest.raises(openai.BadRequestError, match="token id 99999 is outside") as refused:
            await said(logit_bias={"99999": 1})

    assert refused.value.code == "invalid_token_id"


async def test_a_stream_of_several_answers_is_what_the_document_says(deployment: Running) -> None:
    asked: dict[str, Any] = {"model": "demo", "messages": HELLO, "n": 2, "seed": 3, "max_tokens": 8}
    async with client(deployment) as ask:
        whole = await ask.chat.completions.create(**asked, logprobs=True, top_logprobs=3)
        events = await ask.chat.completions.create(
            **asked, logprobs=True, top_logprobs=3, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in events]

    assert chunks[-1].usage == whole.usage
    for choice in whole.choices:
        said = [one for chunk in chunks for one in chunk.choices if one.index == choice.index]
        assert "".join(one.delta.content or "" for one in said) == choice.message.content
        assert said[-1].finish_reason == choice.finish_reason
        listed = [token for one in said if one.logprobs for token in one.logprobs.content or []]
        assert choice.logprobs is not None
        assert [token.token for token in listed] == [token.token for token in choice.logprobs.content or []]


async def test_log_probabilities_spell_the_answer(deployment: Running) -> None:
    async with client(deployment) as ask:
        chat = await ask.chat.completions.create(
            model="demo", messages=HELLO, temperature=0, logprobs=True, top_logprobs=5
        )
        whole = await ask.completions.create(model="demo", prompt="len:", temperature=0, logprobs=2)

    assert chat.choices[0].logprobs is not None
    tokens = chat.choices[0].logprobs.content or []
    assert "".join(token.token for token in tokens) == chat.choices[0].message.content == LEN
    for token in tokens:
        assert len(token.top_logprobs) == 5
        assert token.top_logprobs[0].token == token.token  # greedy: the likeliest
        assert token.top_logprobs[0].logprob == token.logprob <= 0
        assert sum(math.exp(one.logprob) for one in token.top_logprobs) <= 1 + 1e-6
    found = whole.choices[0].logprobs
    assert found is not None
    assert "".join(found.tokens or []) == whole.choices[0].text
    assert found.text_offset == [
        len("".join((found.tokens or [])[:place])) for place in range(len(found.tokens or []))
    ]


async def test_what_a_stop_string_cuts_off_is_not_listed(deployment: Running) -> None:
    async with client(deployment) as ask:
        chat = await ask.chat.completions.create(
            model="demo", messages=HELLO, temperature=0, logprobs=True, stop=[" of"]
        )

    assert chat.choices[0].message.content == "Return the number"
    assert chat.choices[0].logprobs is not None
    assert [token.token for token in chat.choices[0].logprobs.content or []] == ["Return", " the", " number"]


async def test_an_echoed_prompt_is_scored_as_an_answer_is(deployment: Running) -> None:
    """A text has equal log probabilities as a prompt and as an answer."""
    asked = {"prompt": "len:", "temperature": 0, "max_tokens": 4, "logprobs": 1}
    said = await post(deployment, "/v1/completions", asked)
    text = "len:" + said["choices"][0]["text"]
    echoed = await post(
        deployment, "/v1/completions", {"prompt": text, "echo": True, "max_tokens": 0, "logprobs": 1}
    )

    [choice], found = echoed["choices"], echoed["choices"][0]["logprobs"]
    assert choice["text"] == text
    assert found["token_logprobs"][0] is None
    assert "".join(found["tokens"]) == text
    assert echoed["usage"]["completion_tokens"] == 0
    assert echoed["usage"]["prompt_tokens"] == len(found["tokens"])
    generated = said["choices"][0]["logprobs"]
    assert found["tokens"][-4:] == generated["tokens"]
    assert found["token_logprobs"][-4:] == pytest.approx(generated["token_logprobs"], abs=1e-4)


async def test_token_ids_are_those_of_the_tokenizer(deployment: Running) -> None:
    asked = {"temperature": 0, "max_tokens": 4, "return_token_ids": True, "logprobs": True}
    messages = [{"role": "user", "content": "What does len do?"}]
    said = await post(deployment, "/v1/chat/completions", asked | {"messages": messages})
    [choice] = said["choices"]
    whole = await post(
        deployment, "/v1/completions",
        {"prompt": said["prompt_token_ids"] + choice["token_ids"], "max_tokens": 0, "echo": True},
    )  # fmt: skip

    assert len(said["prompt_token_ids"]) == said["usage"]["prompt_tokens"]
    assert len(choice["token_ids"]) == said["usage"]["completion_tokens"] == 4
    assert len(choice["logprobs"]["content"]) == 4
    assert choice["message"]["content"] == "Return the number of"
    assert "What does len do?" in whole["choices"][0]["text"]
    assert whole["choices"][0]["text"].endswith("Return the number of")


async def test_prompts_as_lists_and_as_tokens(deployment: Running) -> None:
    asked: dict[str, Any] = {"model": "demo", "temperature": 0, "max_tokens": 3}
    ids = {"prompt": "len:", "max_tokens": 0, "echo": True}
    async with client(deployment) as ask:
        alone = [await ask.completions.create(prompt=prompt, **asked) for prompt in ("len:", "zip:")]
        listed = await ask.completions.create(prompt=["len:", "zip:"], n=2, **asked)
        tokens = await ask.completions.create(prompt=[[5, 6, 7], [5, 6, 7]], **asked)
    echoed = await post(deployment, "/v1/completions", ids)

    first, second = (answer.choices[0].text for answer in alone)
    assert [choice.index for choice in listed.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in listed.choices] == [first, first, second, second]
    assert listed.usage is not None
    assert tokens.usage is not None
    assert listed.usage.prompt_tokens == sum(one.usage.prompt_tokens for one in alone if one.usage)
    assert tokens.choices[0].text == tokens.choices[1].text
    assert tokens.usage.prompt_tokens == 6
    assert echoed["choices"][0]["text"] == "len:"


async def test_a_completions_stream_as_openais_own_is(deployment: Running) -> None:
    async with client(deployment, is_strict=False) as ask:
        events = await ask.completions.create(
            model="demo", prompt=["len:", "zip:"], temperature=0, max_tokens=6, stream=True, logprobs=1,
            echo=True, stream_options={"include_usage": True},
        )  # fmt: skip
        chunks = [chunk async for chunk in events]

    texts = {
        index: "".join(one.text for chunk in chunks for one in chunk.choices if one.index == index)
        for index in (0, 1)
    }
    assert texts[0].startswith("len: Return the")
    assert texts[1].startswith("zip: ")
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12


@pytest.mark.parametrize(
    ("asked", "kind", "param"),
    [
        ({"model": "gpt-4"}, openai.NotFoundError, "model"),
        ({"n": 1000}, openai.BadRequestError, "n"),
        ({"max_tokens": 10**9}, openai.BadRequestError, "max_tokens"),
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"max_tokens": 5000}, openai.BadRequestError, None),
        ({"functions": [{"name": "f"}]}, openai.BadRequestError, "functions"),
        # A long answer: one that has its end on the log before the deadline is seen to have passed is whole.
        (
            {"max_tokens": 1000, "extra_body": {"timeout_s": 0.001, "ignore_eos": True}},
            openai.InternalServerError,
            None,
        ),
    ],
)
async def test_errors_are_of_openais_own_classes(
    deployment: Running, asked: dict[str, Any], kind: type[openai.APIStatusError], param: str | None
) -> None:
    async with client(deployment) as ask:
        with pytest.raises(kind) as caught:
            await ask.chat.completions.create(**{"model": "demo", "messages": HELLO, **asked})

    assert type(caught.value) is kind
    assert caught.value.param == param
    check.check(check.ERROR, {"error": caught.value.body})


async def test_a_route_that_is_not_served_is_a_typed_404(deployment: Running) -> None:
    async with client(deployment) as ask:
        with pytest.raises(openai.NotFoundError, match="not served here") as caught:
            await ask.fine_tuning.jobs.list()

    assert caught.value.code == "not_served"


async def test_every_answer_of_a_deployment_has_openais_schema(deployment: Running) -> None:
    before = check.COUNTS.total()
    chat: dict[str, Any] = {"messages": HELLO, "temperature": 0, "max_tokens": 5}
    prompt: dict[str, Any] = {"prompt": "len:", "temperature": 0, "max_tokens": 5}
    asked: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", chat),
        ("/v1/chat/completions", {**chat, "logprobs": True, "top_logprobs": 20}),
        ("/v1/completions", prompt),
        ("/v1/completions", {**prompt, "logprobs": 5, "echo": True}),
    ]
    changes: list[dict[str, Any]] = [{}, {"n": 2}, {"stop": "the"}, {"seed": 1, "temperature": 2}]
    for (path, body), change in itertools.product(asked, changes):
        assert "choices" in await post(deployment, path, {**body, **change})
        await stream(deployment, path, {**body, **change, "stream_options": {"include_usage": True}})
    async with clients.http(deployment) as http:
        http.event_hooks = {"response": [check.check_read]}
        await http.get("/v1/models")
        await http.get("/v1/models/demo")

    assert check.COUNTS.total() - before > 60


async def test_what_takes_too_long_is_dropped_by_the_engine(random_deployment: Running) -> None:
    running, request_id = random_deployment, "too-long"
    body = clients.body("Tell me everything.", request_id, max_tokens=400, ignore_eos=True, temperature=0)
    async with clients.reader(running) as reader:
        async with clients.http(running) as http:
            response = await http.post("/generate", json=body | {"streaming": False, "timeout_s": 0.2})
        _, failed = await reader.until(reader.subjects.walk(request_id), RequestFailed)
        _, stopped = await reader.until(reader.subjects.done(0, request_id), WalkStopped)
        beat = await reader.said(reader.subjects.heartbeat("worker", "0"), lambda beat: beat["running"] == 0)

    assert response.status_code == 504
    assert response.json()["error"]["code"] == failed.failure.code == "deadline_exceeded"
    assert stopped.tokens < 400
    assert (beat["waiting"], beat["kv_used"]) == (0, 0)
    assert clients.run_on(running, "replay", request_id).returncode == 0


async def test_choices_of_one_question_run_in_one_batch_and_are_cancelled_together(
    random_deployment: Running,
) -> None:
    running, request_id = random_deployment, "batched"
    async with clients.http(running) as http:
        model = (await http.get("/v1/models")).json()["data"][0]["id"]
    body = {
        "model": model, "messages": HELLO, "n": 3, "stream": True, "max_tokens": 400,
        "request_id": request_id, "ignore_eos": True,
    }  # fmt: skip
    async with clients.reader(running) as reader:
        async with (
            clients.http(running) as http,
            http.stream("POST", "/v1/chat/completions", json=body) as response,
        ):
            seen: set[int] = set()
            async for line in response.aiter_lines():
                seen |= {index for index in range(3) if f'"index":{index},' in line}
                if len(seen) == 3:
                    break
        async with asyncio.TaskGroup() as tasks:
            ended = [
                tasks.create_task(reader.until(reader.subjects.walk(part), RequestCancelled))
                for part in (request_id, f"{request_id}-1", f"{request_id}-2")
            ]
        [submitted] = [
            event for event in await reader.events(f"{request_id}-2") if isinstance(event, RequestSubmitted)
        ]
        beat = await reader.said(reader.subjects.heartbeat("worker", "0"), lambda beat: beat["running"] == 0)

    assert {task.result()[1].reason for task in ended} == {"the client disconnected"}
    assert (submitted.parent, submitted.parts, submitted.params.choice) == (request_id, 3, 2)
    assert (beat["waiting"], beat["kv_used"]) == (0, 0)


async def test_a_stream_is_resumed_behind_what_its_client_has(deployment: Running) -> None:
    body = {"model": "demo", "messages": HELLO, "temperature": 0, "stream": True, "request_id": "resumed"}
    async with clients.http(deployment) as http:
        whole = (await http.post("/v1/chat/completions", json=body)).text
        positions = [line.removeprefix("id: ") for line in whole.splitlines() if line.startswith("id: ")]
        _, _, tail = whole.partition(f"id: {positions[0]}\n")
        rest = await http.post("/v1/chat/completions", json=body, headers={"Last-Event-ID": positions[0]})

    begun, _, behind = tail.partition("\n\n")
    assert "assistant" in begun
    assert [line for line in rest.text.splitlines() if line.startswith("id: ")] == [
        line for line in behind.splitlines() if line.startswith("id: ")
    ]
    assert "assistant" not in rest.text
    assert rest.text.endswith("data: [DONE]\n\n")


async def test_a_prompts_cache_is_shared_with_its_salt_alone(deployment: Running) -> None:
    prompt = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen " * 2

    async def cached(salt: str | None) -> int:
        """The cached tokens of the prompt, by the usage of an answer."""
        body = {"prompt": prompt, "max_tokens": 2, "cache_salt": salt}
        usage = (await post(deployment, "/v1/completions", body))["usage"]
        return int(usage.get("prompt_tokens_details", {}).get("cached_tokens", 0))

    first = [await cached(salt) for salt in (None, "mine", "yours")]
    again = [await cached(salt) for salt in (None, "mine", "yours")]

    assert first == [0, 0, 0]
    assert len({*again}) == 1
    assert again[0] > 16


async def test_only_allowed_tokens_are_chosen(deployment: Running) -> None:
    body = {"prompt": "len:", "max_tokens": 6, "allowed_token_ids": [70, 71], "temperature": 2, "logprobs": 0}

    found = await post(deployment, "/v1/completions", body)

    async with clients.http(deployment) as http:
        texts = [
            (await http.post("/detokenize", json={"model": "demo", "tokens": [one]})).json()["prompt"]
            for one in (70, 71)
        ]
    assert found["usage"]["completion_tokens"] == 6
    assert set(found["choices"][0]["logprobs"]["tokens"]) <= set(texts)
