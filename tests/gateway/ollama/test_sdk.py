"""Ollama's own client against a gateway behind a socket."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import ollama
import pytest

from tests.gateway.openai.test_sdk import saying
from tests.gateway.world import Performance, Script, deployment, echo, listening

pytestmark = pytest.mark.processes
MESSAGES = [{"role": "user", "content": "Is it warm in Ulm?"}]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ulm"}}\n</tool_call>'


def get_weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: its name.
    """
    return f"12 degrees in {city}"


@asynccontextmanager
async def asking(script: Script = echo) -> AsyncIterator[ollama.AsyncClient]:
    async with deployment(script, tool_calls="hermes") as world, listening(world) as url:
        client = ollama.AsyncClient(host=url)
        yield client
        await client._client.aclose()


async def test_a_chat_whole_and_streamed() -> None:
    async with asking() as client:
        whole = await client.chat("demo", MESSAGES)
        pieces = [one async for one in await client.chat("demo", MESSAGES, stream=True)]
    assert whole.message.content == "Is it warm in Ulm?"
    assert "".join(one.message.content or "" for one in pieces) == whole.message.content
    assert (pieces[-1].done, pieces[-1].done_reason, pieces[-1].eval_count) == (True, "stop", 5)


async def test_a_prompt_whole_and_streamed() -> None:
    async with asking() as client:
        whole = await client.generate("demo", "Is it warm?", options={"temperature": 0, "num_predict": 5})
        pieces = [one async for one in await client.generate("demo", "Is it warm?", stream=True)]
    assert whole.response == "".join(one.response or "" for one in pieces) == "Is it warm?"


async def test_a_call_of_a_python_function_goes_round() -> None:
    async with asking(saying(CALL, 9)) as client:
        first = await client.chat("demo", MESSAGES, tools=[get_weather])
        [call] = first.message.tool_calls or []
        assert (call.function.name, dict(call.function.arguments)) == ("get_weather", {"city": "Ulm"})
        result = {"role": "tool", "tool_name": call.function.name, "content": get_weather("Ulm")}
        again = await client.chat("demo", [*MESSAGES, first.message, result], tools=[get_weather])
    assert again.message.tool_calls


async def test_texts_are_embedded() -> None:
    async def vectors(performance: Performance) -> None:
        performance.vector([float(len(performance.event.inputs.text or "")), 0.5])
        performance.finish()

    async with asking(vectors) as client:
        found = await client.embed("demo", ["a", "bb"])
    assert found.embeddings == [[1.0, 0.5], [2.0, 0.5]]


async def test_models_and_errors() -> None:
    async with asking() as client:
        listed = await client.list()
        shown = await client.show("demo")
        running = await client.ps()
        with pytest.raises(ollama.ResponseError, match="other"):
            await client.chat("other", MESSAGES)
    assert [one.model for one in listed.models] == [one.model for one in running.models] == ["demo"]
    assert "tools" in (shown.capabilities or [])
