"""Reasoning: what a request asks for on each API, and the answers with their reasoning apart."""

import json
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest

from shared.events import RequestSubmitted
from tests.gateway.openai.test_tools import CALL, WEATHER
from tests.gateway.world import CHAT, Performance, Script, deployment, listening

PATH = "/v1/chat/completions"
THOUGHT = "7 * 13 = 91"
PIECES = ["<thi", "nk>\n7 * ", "13 = 91\n</th", "ink>\n\nNo", ", it is not."]
INSIDE = [THOUGHT[:4], THOUGHT[4:] + "</think>", "No, it is not."]
ANSWER = "No, it is not."
TURNS = [{"role": "user", "content": "Is 91 a prime?"}]


def thinking(pieces: list[str], *, is_inside: bool = False) -> Script:
    """A model that writes these pieces; `is_inside`: its prompt ends with the opening mark."""

    async def perform(performance: Performance) -> None:
        for place, piece in enumerate(pieces):
            metadata = {"reasoning": True} if is_inside and not place else None
            performance.output(performance.chunk(piece, metadata=metadata))
        performance.finish(reasoning_tokens=len(pieces) - 1)

    return perform


async def asked(
    script: Script | None = None,
    path: str = PATH,
    body: dict[str, Any] | None = None,
    *,
    formats: tuple[str, str] = ("hermes", "think"),
    **change: Any,
) -> tuple[httpx.Response, RequestSubmitted]:
    calls, reasoning = formats
    async with deployment(script or thinking(PIECES), tool_calls=calls, reasoning=reasoning) as world:
        response = await world.client.post(path, json=(body or CHAT) | change)
        events = [event for event in world.events("request") if isinstance(event, RequestSubmitted)]
    assert response.status_code == 200, response.text
    return response, events[0]


def deltas(response: httpx.Response) -> list[dict[str, Any]]:
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    return [event["choices"][0]["delta"] for event in events if event["choices"]]


# ---- answers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", [thinking(PIECES), thinking(INSIDE, is_inside=True)])
async def test_the_reasoning_is_apart_from_the_text(script: Script) -> None:
    response, _ = await asked(script)

    message = response.json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == (THOUGHT, ANSWER)


@pytest.mark.parametrize("script", [thinking(PIECES), thinking(INSIDE, is_inside=True)])
async def test_a_stream_has_the_reasoning_first(script: Script) -> None:
    response, _ = await asked(script, stream=True)

    found = deltas(response)
    assert "".join(delta.get("reasoning_content", "") for delta in found) == THOUGHT
    assert "".join(delta.get("content", "") for delta in found) == ANSWER
    kinds = [next(iter(delta)) for delta in found if delta and "role" not in delta]
    assert kinds == sorted(kinds, key=["reasoning_content", "content"].index)


async def test_usage_counts_the_reasoning() -> None:
    response, _ = await asked()

    assert response.json()["usage"]["completion_tokens_details"] == {"reasoning_tokens": 4}


async def test_an_answer_that_ends_within_its_reasoning_has_no_text() -> None:
    response, _ = await asked(thinking(["<think>hm", "mm"]))

    message = response.json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hmmm", "")


async def test_an_answer_without_reasoning_has_none() -> None:
    response, _ = await asked(thinking(["No."]))

    assert response.json()["choices"][0]["message"] == {
        "role": "assistant", "content": "No.", "refusal": None,
    }  # fmt: skip


async def test_calls_come_after_the_reasoning_and_not_from_it() -> None:
    script = thinking([f"<think>I could write {CALL}", "</think>", CALL])
    response, _ = await asked(script, tools=[WEATHER])
    streamed, _ = await asked(script, tools=[WEATHER], stream=True)

    choice = response.json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["reasoning_content"] == f"I could write {CALL}"
    assert choice["message"]["content"] is None
    [call] = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Ulm"}
    found = [one for delta in deltas(streamed) for one in delta.get("tool_calls", [])]
    assert [one["function"].get("name") for one in found if "id" in one] == ["get_weather"]
    assert "".join(one["function"]["arguments"] for one in found) == call["function"]["arguments"]


async def test_the_channels_of_an_answer_are_its_reasoning_its_text_and_its_calls() -> None:
    head = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    pieces = [
        "<|channel|>analysis<|mess",
        "age|>7 * 13 = 91<|end|><|start|>assistant",
        head,
        '{"city": "Ulm"}',
    ]
    response, _ = await asked(thinking(pieces), formats=("harmony", "harmony"), tools=[WEATHER])
    final = [*pieces[:2], "<|channel|>final<|message|>", ANSWER]
    plain, _ = await asked(thinking(final), formats=("harmony", "harmony"))

    called = response.json()["choices"][0]
    assert (called["finish_reason"], called["message"]["content"]) == ("tool_calls", None)
    assert called["message"]["reasoning_content"] == THOUGHT
    [call] = called["message"]["tool_calls"]
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Ulm"}'}
    message = plain.json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == (THOUGHT, ANSWER)


async def test_a_client_may_have_the_reasoning_within_the_text_or_not_at_all() -> None:
    within, _ = await asked(separate_reasoning=False)
    without, _ = await asked(include_reasoning=False)

    assert within.json()["choices"][0]["message"]["content"] == "".join(PIECES)
    message = without.json()["choices"][0]["message"]
    assert message["content"] == ANSWER
    assert "reasoning_content" not in message


async def test_a_completion_is_the_raw_text() -> None:
    response, _ = await asked(path="/v1/completions", body={"model": "demo", "prompt": "x"})

    assert response.json()["choices"][0]["text"] == "".join(PIECES)


async def test_a_resumed_stream_continues_within_the_reasoning() -> None:
    async with deployment(thinking(PIECES), reasoning="think") as world:
        body = CHAT | {"stream": True, "request_id": "r1"}
        whole = (await world.client.post(PATH, json=body)).text
        events = whole.split("\n\n")
        [third] = [line[4:] for line in events[2].splitlines() if line.startswith("id: ")]
        rest = (await world.client.post(PATH, json=body, headers={"last-event-id": third})).text

    assert rest == "\n\n".join(events[3:])


# ---- requests -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "options", "effort", "budget"),
    [
        ({"chat_template_kwargs": {"enable_thinking": False}}, {"enable_thinking": False}, None, None),
        ({"enable_thinking": True, "thinking_budget": 64}, {"enable_thinking": True}, None, 64),
        ({"reasoning_effort": "low"}, {}, "low", None),
        ({"chat_template_kwargs": {"a": [1]}, "enable_thinking": False}, {"a": [1], "enable_thinking": False},
         None, None),
    ],
)  # fmt: skip
async def test_a_request_says_how_the_model_is_to_think(
    change: dict[str, Any], options: dict[str, Any], effort: str | None, budget: int | None
) -> None:
    _, event = await asked(**change)

    assert event.inputs.template_options == options
    assert (event.inputs.reasoning_effort, event.params.thinking_budget) == (effort, budget)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"chat_template_kwargs": {"enable_thinking": True}, "enable_thinking": False}, "enable_thinking"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a": 2**70}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a": "x" * 70_000}}, "chat_template_kwargs"),
        ({"reasoning_effort": "much"}, "reasoning_effort"),
        ({"thinking_budget": -1}, "thinking_budget"),
    ],
)
async def test_what_is_wrong_is_named(change: dict[str, Any], param: str) -> None:
    async with deployment() as world:
        response = await world.client.post(PATH, json=CHAT | change)
        assert not world.events("request")

    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


async def test_earlier_reasoning_reaches_the_template() -> None:
    def turns(**thought: str | None) -> list[dict[str, Any]]:
        return [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", **thought},
                {"role": "user", "content": "c"}]  # fmt: skip

    _, plain = await asked(messages=turns(reasoning_content="t"))
    _, other = await asked(messages=turns(reasoning="t"))

    assert plain.inputs.messages == other.inputs.messages == turns(reasoning_content="t")


async def test_generate_takes_the_same_options() -> None:
    _, event = await asked(
        path="/generate",
        body={"text": "x"},
        chat_template_kwargs={"enable_thinking": False},
        reasoning_effort="high",
        model_kwargs={"thinking_budget": 9},
    )

    assert event.inputs.template_options == {"enable_thinking": False}
    assert (event.inputs.reasoning_effort, event.params.thinking_budget) == ("high", 9)


# ---- other clients ---------------------------------------------------------------------------------------


async def test_openais_client_reads_the_reasoning() -> None:
    async with (
        deployment(thinking(PIECES), reasoning="think") as world,
        listening(world) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        answer = await client.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": "x"}], reasoning_effort="low"
        )

    message = answer.choices[0].message
    assert (message.content, getattr(message, "reasoning_content", None)) == (ANSWER, THOUGHT)
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens == 4


async def test_anthropics_client_reads_a_thinking_block() -> None:
    async with deployment(thinking(PIECES), reasoning="think") as world, listening(world) as url:
        async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:
            whole = await client.messages.create(
                model="demo",
                max_tokens=2000,
                messages=[{"role": "user", "content": "x"}],
                thinking={"type": "enabled", "budget_tokens": 1024},
            )
            async with client.messages.stream(
                model="demo", max_tokens=2000, messages=[{"role": "user", "content": "x"}]
            ) as stream:
                streamed = await stream.get_final_message()
        [event, _] = [one for one in world.events("request") if isinstance(one, RequestSubmitted)]

    for message in (whole, streamed):
        thought, text = message.content
        assert thought.type == "thinking"
        assert text.type == "text"
        assert (thought.thinking, text.text) == (THOUGHT, ANSWER)
    assert event.inputs.template_options == {"enable_thinking": True}
    assert event.params.thinking_budget == 1024


async def test_anthropics_thoughts_may_be_left_out() -> None:
    body = {"model": "demo", "max_tokens": 9, "messages": CHAT["messages"]}

    response, _ = await asked(
        path="/v1/messages", body=body, thinking={"type": "adaptive", "display": "omitted"}
    )

    assert [block["type"] for block in response.json()["content"]] == ["text"]


@pytest.mark.parametrize(
    ("think", "options", "effort"),
    [(True, {"enable_thinking": True}, None), (False, {"enable_thinking": False}, None), ("low", {}, "low")],
)
async def test_ollamas_client_reads_the_thoughts(think: Any, options: dict[str, Any], effort: Any) -> None:
    async with deployment(thinking(PIECES), reasoning="think") as world, listening(world) as url:
        client = ollama.AsyncClient(host=url)
        whole = await client.chat(model="demo", messages=TURNS, think=think)
        pieces = [piece async for piece in await client.chat(model="demo", messages=TURNS, stream=True)]
        prompt = await client.generate(model="demo", prompt="x", think=think)
        shown = await client.show("demo")
        await client._client.aclose()
        event = next(one for one in world.events("request") if isinstance(one, RequestSubmitted))

    assert (whole.message.thinking, whole.message.content) == (THOUGHT, ANSWER)
    assert "".join(piece.message.thinking or "" for piece in pieces) == THOUGHT
    assert "".join(piece.message.content or "" for piece in pieces) == ANSWER
    assert (prompt.thinking, prompt.response) == (THOUGHT, ANSWER)
    assert "thinking" in (shown.capabilities or [])
    assert (event.inputs.template_options, event.inputs.reasoning_effort) == (options, effort)
