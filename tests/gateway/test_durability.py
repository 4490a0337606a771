"""Every answer reports the durability of its events: the one found, and not the configured one."""

from typing import Any

import pytest

from shared.events import Failure
from tests.gateway.generate.test_routes import lines
from tests.gateway.speech.test_speech import ASKED, SPEAKER, speak
from tests.gateway.world import CHAT, SERVED, Performance, deployment, echo

HEADER = "x-dalsegno-durability"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": "x"}),
        ("/generate", {"text": "x", "streaming": False}),
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", CHAT | {"stream": True, "n": 2}),
        ("/v1/completions", {"model": "demo", "prompt": "x"}),
        ("/v1/audio/speech", ASKED),
    ],
)
async def test_every_answer_has_it_in_a_header(path: str, body: dict[str, Any]) -> None:
    speaks = path.endswith("speech")
    async with deployment(speak if speaks else echo, served=SPEAKER if speaks else SERVED) as world:
        world.server.durability = "host"
        response = await world.client.post(path, json=body)

    assert (response.status_code, response.headers[HEADER]) == (200, "host")


async def test_the_native_route_has_it_in_its_metadata() -> None:
    async with deployment() as world:
        world.server.durability = "cluster"
        streamed = await world.client.post("/generate", json={"text": "x"})
        document = await world.client.post("/generate", json={"text": "x", "streaming": False})

    assert lines(streamed)[-1]["metadata"]["durability"] == "cluster"
    assert document.json()["outputs"]["text"][0]["metadata"]["durability"] == "cluster"


async def test_what_failed_on_the_log_has_it_and_what_never_was_there_has_not() -> None:
    async def fail(performance: Performance) -> None:
        performance.fail(Failure(code="worker_lost", message="gone", status=500))

    async with deployment(fail) as world:
        failed = await world.client.post("/generate", json={"text": "x"})
        refused = await world.client.post("/generate", json={"text": 7})

    assert (failed.status_code, failed.headers[HEADER]) == (500, "process")
    assert (refused.status_code, HEADER in refused.headers) == (400, False)
