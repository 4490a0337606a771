"""Responses of a real deployment: continued, streamed twice, and made in the background without a client."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import openai

from tests.e2e import clients
from tests.e2e.deploy import Running


@asynccontextmanager
async def client(running: Running) -> AsyncGenerator[openai.AsyncOpenAI, None]:
    async with openai.AsyncOpenAI(
        base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=clients.PATIENCE_S
    ) as found:
        yield found


async def ended(ask: openai.AsyncOpenAI, response_id: str) -> Any:
    async with asyncio.timeout(clients.PATIENCE_S):
        while (found := await ask.responses.retrieve(response_id)).status in ("queued", "in_progress"):  # noqa: ASYNC110 - clients poll
            await asyncio.sleep(0.02)
    return found


async def test_a_response_is_continued_with_what_was_said(deployment: Running) -> None:
    async with client(deployment) as ask:
        first = await ask.responses.create(model="demo", input="What does len do?", temperature=0)
        second = await ask.responses.create(
            model="demo", input="What does sorted do?", previous_response_id=first.id, temperature=0
        )
        chat = await ask.chat.completions.create(
            model="demo",
            messages=[
                {"role": "user", "content": "What does len do?"},
                {"role": "assistant", "content": first.output_text},
                {"role": "user", "content": "What does sorted do?"},
            ],
            temperature=0,
        )
    assert first.output_text == "Return the number of items in a container."
    assert second.output_text == chat.choices[0].message.content
    assert second.usage is not None
    assert chat.usage is not None
    assert second.usage.input_tokens == chat.usage.prompt_tokens


async def test_a_response_in_the_background_is_read_while_it_is_written(random_deployment: Running) -> None:
    async with client(random_deployment) as ask:
        how: dict[str, Any] = {"max_output_tokens": 300, "extra_body": {"ignore_eos": True}}
        name = (await ask.models.list()).data[0].id
        asked = await ask.responses.create(model=name, input="x", background=True, **how)
        seen = [
            event async for event in await ask.responses.retrieve(asked.id, stream=True, starting_after=3)
        ]
        whole = await ended(ask, asked.id)

    assert asked.status in ("queued", "in_progress", "completed")
    assert [event.sequence_number for event in seen] == list(range(4, 4 + len(seen)))
    assert whole.usage.output_tokens == 300
    assert whole.status == "incomplete"
    text = "".join(event.delta for event in seen if event.type == "response.output_text.delta")
    assert whole.output_text.endswith(text)
    assert len(text) > len(whole.output_text) // 2


async def test_a_cancelled_response_has_no_output(random_deployment: Running) -> None:
    async with client(random_deployment) as ask:
        asked = await ask.responses.create(
            model=(await ask.models.list()).data[0].id,
            input="x",
            background=True,
            max_output_tokens=450,
            extra_body={"ignore_eos": True},
        )
        await ask.responses.cancel(asked.id)
        found = await ended(ask, asked.id)

    assert found.status == "cancelled"


async def test_what_the_model_refuses_is_an_error_in_the_background_too(deployment: Running) -> None:
    async with clients.http(deployment) as http:
        answer = await http.post(
            "/v1/responses", json={"input": "x", "background": True, "chat_template_kwargs": {"mood": 1}}
        )

    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "not_supported"
