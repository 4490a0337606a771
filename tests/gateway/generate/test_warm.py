"""`POST /warm`: the submitted event, and the answer."""

from typing import Any

import pytest

from shared.events import Inputs, Params, RequestSubmitted
from tests.gateway.world import MESSAGES, Performance, deployment


async def keep(performance: Performance) -> None:
    performance.finish(cached_tokens=4)


@pytest.mark.parametrize(
    ("body", "inputs"),
    [
        ({"text": "You are kind."}, Inputs(text="You are kind.")),
        ({"text": "raw", "chat": False}, Inputs(text="raw", chat=False)),
        ({"messages": MESSAGES}, Inputs(messages=MESSAGES)),
        ({"token_ids": [4, 5]}, Inputs(token_ids=[4, 5], chat=False)),
    ],
)
async def test_a_beginning_is_computed_and_nothing_is_answered(body: dict[str, Any], inputs: Inputs) -> None:
    async with deployment(keep) as world:
        response = await world.client.post("/warm", json={**body, "request_id": "w"})

        [event] = world.events("request")
    assert response.json() == {
        "request_id": "w",
        "prompt_tokens": 7,
        "cached_tokens": 4,
        "durability": "process",
    }
    assert isinstance(event, RequestSubmitted)
    assert (event.inputs, event.params) == (inputs, Params(warm=True))


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({}, "missing_required_parameter"),
        ({"text": "x", "streaming": True}, "unknown_parameter"),
        ({"text": "x", "model": "other"}, "model_not_found"),
    ],
)
async def test_what_is_no_beginning_is_refused(body: dict[str, Any], code: str) -> None:
    async with deployment(keep) as world:
        response = await world.client.post("/warm", json=body)

        assert world.events("request") == []
    assert response.json()["error"]["code"] == code
    assert response.status_code in {400, 404}


async def test_generate_tells_how_much_is_kept_too() -> None:
    async with deployment(keep) as world:
        body = {"text": "x", "streaming": False, "model_kwargs": {"warm": True}}
        response = await world.client.post("/generate", json=body)

    [text] = response.json()["outputs"]["text"]
    assert text["metadata"]["usage"]["cached_tokens"] == 4
