"""Forced tool calls and schema-guided answers of a real deployment, through OpenAI's own client."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam
from pydantic import BaseModel, Field

from tests.e2e import clients
from tests.e2e.deploy import Running
from tests.gateway.openai_schema import check

QUESTION: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Is it warm?"}]
HOW: dict[str, Any] = {"model": "demo", "messages": QUESTION, "temperature": 0}


class Weather(BaseModel):
    """How it is outside."""

    city: Literal["Ulm", "Rom"]
    days: int = Field(ge=1, le=9)


class Clock(BaseModel):
    """What time it is."""

    zone: Literal["CET", "UTC"]


class Verdict(BaseModel):
    kind: Literal["function", "class"]
    is_sure: bool
    digits: list[Literal[1, 2]] = Field(max_length=3)


TOOLS = [openai.pydantic_function_tool(Weather), openai.pydantic_function_tool(Clock)]
TAKEN: dict[str, type[BaseModel]] = {"Weather": Weather, "Clock": Clock}


@asynccontextmanager
async def client(running: Running) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{running.url}/v1",
        api_key="none",
        max_retries=0,
        timeout=clients.PATIENCE_S,
        _strict_response_validation=True,
    ) as found:
        yield found


@pytest.mark.parametrize("temperature", [0, 5])
async def test_an_answer_is_valid_by_its_schema(deployment: Running, temperature: float) -> None:
    how = {**HOW, "temperature": temperature, "seed": 3}
    async with client(deployment) as ask:
        answer = await ask.chat.completions.parse(**how, response_format=Verdict)
        async with ask.chat.completions.stream(**how, response_format=Verdict) as stream:
            streamed = await stream.get_final_completion()

    [choice], [same] = answer.choices, streamed.choices
    assert choice.finish_reason == "stop"
    assert isinstance(choice.message.parsed, Verdict)
    assert same.message.parsed == choice.message.parsed


async def test_a_json_object_is_one(deployment: Running) -> None:
    async with client(deployment) as ask:
        answer = await ask.chat.completions.create(
            **HOW, response_format={"type": "json_object"}, max_tokens=40
        )

    [choice] = answer.choices
    assert (choice.message.content or "").lstrip().startswith("{")
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content or ""), dict)


async def test_a_named_function_is_called_with_valid_arguments(deployment: Running) -> None:
    async with client(deployment) as ask:
        for name, kind in TAKEN.items():
            answer = await ask.chat.completions.parse(
                **HOW, tools=TOOLS, tool_choice={"type": "function", "function": {"name": name}}
            )
            [choice] = answer.choices
            [call] = choice.message.tool_calls or []
            assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
            assert call.function.name == name
            assert isinstance(call.function.parsed_arguments, kind)


async def test_a_required_call_is_made_and_streamed_the_same(deployment: Running) -> None:
    how: dict[str, Any] = {**HOW, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    async with client(deployment) as ask:
        answer = await ask.chat.completions.parse(**how)
        async with ask.chat.completions.stream(**how) as stream:
            streamed = await stream.get_final_completion()

    [call] = answer.choices[0].message.tool_calls or []
    [same] = streamed.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, TAKEN[call.function.name])
    assert same.function.arguments == call.function.arguments
    assert streamed.choices[0].finish_reason == "tool_calls"


async def test_strict_functions_leave_the_model_its_choice(deployment: Running) -> None:
    async with client(deployment) as ask:
        asked = [{"role": "user", "content": "What does len do?"}]
        answer = await ask.chat.completions.create(
            **{**HOW, "messages": asked, "max_tokens": 30}, tools=TOOLS
        )
        told = await ask.chat.completions.create(
            **{**HOW, "messages": asked}, tools=TOOLS, tool_choice="none"
        )

    assert answer.choices[0].message.content
    assert told.choices[0].message.content == "Return the number of items in a container."


async def test_a_stream_of_a_call_goes_on_where_it_broke(deployment: Running) -> None:
    body = {
        **HOW, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "stream": True,
        "request_id": "called",
    }  # fmt: skip
    async with clients.http(deployment) as http:
        http.event_hooks = {"response": [check.check_read]}
        whole = (await http.post("/v1/chat/completions", json=body)).text
        positions = [line.removeprefix("id: ") for line in whole.splitlines() if line.startswith("id: ")]
        for position in (positions[0], positions[len(positions) // 2], positions[-1]):
            behind = whole.split(f"id: {position}\n", 1)[1].partition("\n\n")[2]
            headers = {"Last-Event-ID": position}
            rest = await http.post("/v1/chat/completions", json=body, headers=headers)
            assert rest.text == behind

    assert '"finish_reason":"tool_calls"' in whole


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_schema_that_cannot_be_kept_is_refused_before_the_answer_begins(
    deployment: Running, is_stream: bool
) -> None:
    wrong = {"type": "no type at all"}
    form = {"type": "json_schema", "json_schema": {"name": "wrong", "schema": wrong}}
    async with clients.http(deployment) as http:
        http.event_hooks = {"response": [check.check_read]}
        body = {**HOW, "stream": is_stream, "response_format": form}
        response = await http.post("/v1/chat/completions", json=body)

    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"
