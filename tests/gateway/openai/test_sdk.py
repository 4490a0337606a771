"""Tool calls, read by OpenAI's own client from a gateway with a scripted model."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

import openai
import pytest
from openai.lib.streaming.chat import (
    ContentDeltaEvent,
    FunctionToolCallArgumentsDeltaEvent,
    FunctionToolCallArgumentsDoneEvent,
)
from openai.types.chat import ChatCompletionMessageParam
from pydantic import BaseModel

from shared.events import RequestSubmitted
from tests.gateway.world import Performance, Script, World, deployment, listening

pytestmark = pytest.mark.processes


class Weather(BaseModel):
    """The weather in a city."""

    city: str
    unit: Literal["C", "F"]


class Verdict(BaseModel):
    is_good: bool


TOOL = openai.pydantic_function_tool(Weather)
QUESTION: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Is it warm in Ulm and in Rom?"}]
ULM = '{"city": "Ulm", "unit": "C"}'
ROM = '{"city": "Rom", "unit": "F"}'


def called(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "Weather", "arguments": {arguments}}}\n</tool_call>'


def saying(text: str, size: int) -> Script:
    async def script(performance: Performance) -> None:
        for place in range(0, len(text), size):
            performance.say(text[place : place + size])
        performance.finish()

    return script


@asynccontextmanager
async def asking(script: Script) -> AsyncIterator[tuple[World, openai.AsyncOpenAI]]:
    """OpenAI's client, in its strict mode, against a gateway behind a socket."""
    async with (
        deployment(script, tool_calls="hermes") as world,
        listening(world) as url,
        openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, _strict_response_validation=True
        ) as client,
    ):
        yield world, client


@pytest.mark.parametrize("size", [1, 5, 1000])
async def test_calls_are_parsed_to_what_the_tool_takes(size: int) -> None:
    async with asking(saying(f"Let me see.\n{called(ULM)}\n{called(ROM)}", size)) as (world, client):
        answer = await client.chat.completions.parse(model="demo", messages=QUESTION, tools=[TOOL])
        [submitted] = world.events("request")

    [choice] = answer.choices
    parsed = [call.function.parsed_arguments for call in choice.message.tool_calls or []]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    assert parsed == [Weather(city="Ulm", unit="C"), Weather(city="Rom", unit="F")]
    assert isinstance(submitted, RequestSubmitted)
    assert submitted.inputs.tools[0].function.strict


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
async def test_a_stream_of_calls_adds_up(size: int) -> None:
    contents, arguments, done = [], dict[int, str](), []
    script = saying(f"Let me see.\n{called(ULM)}\n{called(ROM)}", size)
    async with (
        asking(script) as (_, client),
        client.chat.completions.stream(model="demo", messages=QUESTION, tools=[TOOL]) as stream,
    ):
        async for event in stream:
            match event:
                case ContentDeltaEvent():
                    contents.append(event.delta)
                case FunctionToolCallArgumentsDeltaEvent():
                    arguments[event.index] = arguments.get(event.index, "") + event.arguments_delta
                case FunctionToolCallArgumentsDoneEvent():
                    done.append((event.name, event.arguments))
                case _:
                    pass
        answer = await stream.get_final_completion()

    [choice] = answer.choices
    calls = choice.message.tool_calls or []
    assert "".join(contents) == choice.message.content == "Let me see."
    assert arguments == {0: ULM, 1: ROM}
    assert done == [("Weather", ULM), ("Weather", ROM)]
    assert choice.finish_reason == "tool_calls"
    assert [call.function.parsed_arguments for call in calls] == [
        Weather(city="Ulm", unit="C"), Weather(city="Rom", unit="F"),
    ]  # fmt: skip
    assert len({call.id for call in calls}) == 2


async def test_what_a_call_came_to_goes_back_as_the_client_writes_it() -> None:
    async with asking(saying(called(ULM), 9)) as (world, client):
        first = await client.chat.completions.create(model="demo", messages=QUESTION, tools=[TOOL])
        message = first.choices[0].message
        assert message.tool_calls
        came_to: Any = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "yes"}
        said: Any = message.model_dump(exclude_none=True)
        await client.chat.completions.create(model="demo", messages=[*QUESTION, said, came_to], tools=[TOOL])
        _, second = world.events("request")

    assert isinstance(second, RequestSubmitted)
    assert second.inputs.messages is not None
    [made] = second.inputs.messages[1]["tool_calls"]
    assert json.loads(made["function"]["arguments"]) == json.loads(ULM)
    assert second.inputs.messages[2]["tool_call_id"] == made["id"]


async def test_an_answer_by_a_schema_is_parsed() -> None:
    async with asking(saying('{"is_good": true}', 4)) as (world, client):
        answer = await client.chat.completions.parse(model="demo", messages=QUESTION, response_format=Verdict)
        async with client.chat.completions.stream(
            model="demo", messages=QUESTION, response_format=Verdict
        ) as stream:
            streamed = await stream.get_final_completion()
        submitted = world.events("request")

    assert answer.choices[0].message.parsed == Verdict(is_good=True)
    assert streamed.choices[0].message.parsed == Verdict(is_good=True)
    for event in submitted:
        assert isinstance(event, RequestSubmitted)
        assert event.params.guide is not None
        assert event.params.guide.json_schema == {
            **Verdict.model_json_schema(),
            "additionalProperties": False,
        }
