"""Further names of the model (`gateway.model_aliases`): on every API, in lists, and never on the log."""

from dataclasses import replace
from typing import Any

import pytest

from gateway.openai import anthropic_models
from shared.events import RequestSubmitted
from tests.gateway.world import SERVED, deployment

CHAT = {"messages": [{"role": "user", "content": "x"}]}
ALIASES = ["gpt-5", "claude-sonnet-4"]
NAMED = replace(SERVED, aliases=tuple(ALIASES))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/messages", CHAT | {"max_tokens": 9}),
        ("/api/chat", CHAT | {"stream": False}),
        ("/generate", {"text": "x", "streaming": False}),
    ],
)
async def test_a_request_for_an_alias_is_one_for_the_model(path: str, body: dict[str, Any]) -> None:
    async with deployment(served=NAMED) as world:
        response = await world.client.post(path, json=body | {"model": "claude-sonnet-4"})
        other = await world.client.post(path, json=body | {"model": "claude-opus-4"})
        [event] = [one for one in world.events("request") if isinstance(one, RequestSubmitted)]

    assert response.status_code == 200, response.text
    assert event.model == "demo"
    assert other.status_code == 404


async def test_aliases_are_listed() -> None:
    async with deployment(served=NAMED) as world:
        listed = (await world.client.get("/v1/models")).json()["data"]
        one = (await world.client.get("/v1/models/gpt-5")).json()
        anthropics = anthropic_models.model_list(world.gateway)["data"]
        ollamas = (await world.client.get("/api/tags")).json()["models"]

    assert [model["id"] for model in listed] == [model["id"] for model in anthropics] == ["demo", *ALIASES]
    assert [model["name"] for model in ollamas] == ["demo", *ALIASES]
    assert (one["id"], one["root"]) == ("gpt-5", "demo")


async def test_a_response_is_of_the_model_when_it_is_read_again() -> None:
    async with deployment(served=NAMED) as world:
        response = (await world.client.post("/v1/responses", json={"input": "x", "model": "gpt-5"})).json()
        again = (await world.client.get(f"/v1/responses/{response['id']}")).json()

    assert response == again
    assert response["model"] == "demo"
