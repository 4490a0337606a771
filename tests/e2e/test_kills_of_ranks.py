"""A model on three ranks, of which two are killed with -9 while it speaks: nobody hears it.

(The third is killed in `tests.e2e.test_speech`.)
"""

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any, Final

import httpx
import pytest

from shared.events import OutputChunk, OutputFence, RequestFinished
from tests.e2e import clients
from tests.e2e.deploy import Running, serve
from tests.tiny.orpheus import tiny_orpheus

pytestmark = pytest.mark.timeout(300)  # four processes start, and two of them twice
TEXTS: Final = ("what?", "one two three")
ASKED: Final[dict[str, Any]] = {"voice": "zoe", "seed": 7, "max_tokens": 400, "ignore_eos": True}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One deployment for all kills: prefill on rank 0, decode on 1, the decoder of sound on 2."""
    folder = tmp_path_factory.mktemp("ranks")
    with serve(folder, "--checkpoint", str(tiny_orpheus()), model="orpheus_three_ranks") as running:
        yield running


async def say(http: httpx.AsyncClient, text: str, request_id: str) -> bytes:
    body = {"model": "orpheus_three_ranks", "input": text, "response_format": "pcm", **ASKED}
    answer = await http.post("/v1/audio/speech", json={**body, "request_id": request_id})
    assert answer.status_code == 200, answer.text
    return answer.content


async def say_all(http: httpx.AsyncClient, name: str) -> list[bytes]:
    asked = [asyncio.create_task(say(http, text, f"{name}-{n}")) for n, text in enumerate(TEXTS)]
    return [await one for one in asked]


@pytest.fixture(scope="module")
def undisturbed(running: Running) -> list[bytes]:
    """What is heard when nobody is killed."""

    async def ask() -> list[bytes]:
        async with clients.http(running) as http:
            return await say_all(http, "undisturbed")

    return asyncio.run(ask())


async def test_ranks_that_are_killed_change_nothing_of_what_is_heard(
    running: Running, undisturbed: list[bytes]
) -> None:
    name = "disturbed"
    async with clients.http(running) as http, clients.reader(running) as reader:
        speaking = asyncio.create_task(say_all(http, name))
        for number in range(len(TEXTS)):
            await reader.until(reader.subjects.outputs_of(f"{name}-{number}"), OutputChunk)
        for rank in ("0", "1"):
            os.kill(running.pids.worker[rank], signal.SIGKILL)
        heard = await speaking
        logs = [await reader.events(f"{name}-{number}") for number in range(len(TEXTS))]

    assert heard == undisturbed
    disturbed = [log for log in logs if any(isinstance(event, OutputFence) for event in log)]
    assert disturbed, "the kill came too late to disturb anybody"
    for log in disturbed:
        fence = next(place for place, event in enumerate(log) if isinstance(event, OutputFence))
        before = [event for event in log[:fence] if isinstance(event, OutputChunk)]
        [finished] = [event for event in log if isinstance(event, RequestFinished)]
        assert 0 < len(before) <= finished.output.chunks  # what was heard of the first attempt stays
    await clients.wait_until_ready(running)
    replayed = clients.run_on(running, "replay", "--all")
    assert replayed.returncode == 0, replayed.stdout
