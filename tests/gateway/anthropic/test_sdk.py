"""Anthropic's own client, with its default settings, against a gateway behind a socket."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import pytest
from anthropic.types import MessageParam, TextBlock, ToolParam, ToolUseBlock

from configs.secrets import ApiKey
from shared.events import Failure
from tests.gateway.openai.test_sdk import saying
from tests.gateway.world import Performance, Script, World, deployment, echo, listening

pytestmark = pytest.mark.processes
MESSAGES: list[MessageParam] = [{"role": "user", "content": "Is it warm in Ulm?"}]
WEATHER: ToolParam = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ulm"}}\n</tool_call>'


@asynccontextmanager
async def asking(
    script: Script = echo, key: str = "secret"
) -> AsyncIterator[tuple[World, anthropic.AsyncAnthropic]]:
    keys = [ApiKey(name="a", secret="secret")]
    async with (
        deployment(script, tool_calls="hermes", keys=keys) as world,
        listening(world, keys) as url,
        anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0) as client,
    ):
        yield world, client


async def test_a_message_and_its_usage() -> None:
    async with asking() as (_, client):
        message = await client.messages.create(model="demo", max_tokens=20, messages=MESSAGES)
    [block] = message.content
    assert isinstance(block, TextBlock)
    assert block.text == "Is it warm in Ulm?"
    assert (message.role, message.stop_reason, message.model) == ("assistant", "end_turn", "demo")
    assert (message.usage.input_tokens, message.usage.output_tokens) == (7, 5)


@pytest.mark.parametrize("size", [1, 9, 400])
async def test_a_streamed_message_with_a_call_accumulates_to_the_whole_one(size: int) -> None:
    script = saying(f"Let me look.\n{CALL}", size)
    ask: dict[str, Any] = {"model": "demo", "max_tokens": 80, "messages": MESSAGES, "tools": [WEATHER]}
    async with asking(script) as (_, client):
        whole = await client.messages.create(**ask)
        async with client.messages.stream(**ask) as stream:
            texts = [event.text async for event in stream if event.type == "text"]
            streamed = await stream.get_final_message()
    assert (
        [one.type for one in streamed.content] == [one.type for one in whole.content] == ["text", "tool_use"]
    )
    for message in (whole, streamed):
        call = message.content[-1]
        assert isinstance(call, ToolUseBlock)
        assert (call.name, call.input) == ("get_weather", {"city": "Ulm"})
        assert message.stop_reason == "tool_use"
        assert message.usage.output_tokens > 0
        assert message.usage.input_tokens == 7
    assert "".join(texts).strip() == "Let me look."


async def test_a_conversation_with_a_tool_goes_round() -> None:
    """The message that the client got goes back as it is, with the tool's result."""
    async with asking(saying(CALL, 50)) as (world, client):
        first = await client.messages.create(model="demo", max_tokens=80, messages=MESSAGES, tools=[WEATHER])
        [call] = first.content
        assert isinstance(call, ToolUseBlock)
        result: MessageParam = {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "12 degrees"}],
        }
        history: list[MessageParam] = [*MESSAGES, {"role": "assistant", "content": first.content}, result]
        await client.messages.create(model="demo", max_tokens=80, messages=history, tools=[WEATHER])
        last: Any = world.events("request")[-1]
    asked, called, answered = last.inputs.messages
    assert asked["content"] == "Is it warm in Ulm?"
    assert json.loads(called["tool_calls"][0]["function"]["arguments"]) == {"city": "Ulm"}
    assert answered == {"role": "tool", "tool_call_id": call.id, "content": "12 degrees"}


async def test_errors_are_the_clients_own_classes() -> None:
    async def overloaded(performance: Performance) -> None:
        performance.fail(Failure(code="queue_full", message="too many", status=429))

    async with asking(key="guessed") as (_, client):
        with pytest.raises(anthropic.AuthenticationError):
            await client.messages.create(model="demo", max_tokens=5, messages=MESSAGES)
    async with asking(overloaded) as (_, client):
        with pytest.raises(anthropic.RateLimitError, match="too many"):
            await client.messages.create(model="demo", max_tokens=5, messages=MESSAGES)
        with pytest.raises(anthropic.NotFoundError, match="other"):
            await client.messages.create(model="other", max_tokens=5, messages=MESSAGES)
        wrong = {"temperature": -1}
        with pytest.raises(anthropic.BadRequestError, match="temperature"):
            await client.messages.create(model="demo", max_tokens=5, messages=MESSAGES, extra_body=wrong)


async def test_a_stream_that_fails_raises() -> None:
    async def broken(performance: Performance) -> None:
        performance.say("It")
        await asyncio.sleep(0)
        performance.fail(Failure(code="worker_lost", message="rank 0 was lost", status=503))

    async with asking(broken) as (_, client):
        with pytest.raises(anthropic.APIStatusError, match="rank 0 was lost"):
            async with client.messages.stream(model="demo", max_tokens=5, messages=MESSAGES) as stream:
                await stream.get_final_message()


async def test_the_models_are_listed() -> None:
    async with asking() as (_, client):
        listed = [one async for one in client.models.list()]
        one = await client.models.retrieve("demo")
    assert [model.id for model in listed] == ["demo"]
    assert (one.id, one.type, one.display_name) == ("demo", "model", "demo")
    assert one.created_at.year >= 2025
