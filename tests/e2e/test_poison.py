"""A worker dies of a request, is stopped, or hangs: it is replaced, and no client notices.

All tests share one deployment; dead roles are restarted for the next.
"""

import asyncio
import json
import os
import signal
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from typing import Any, Final

import httpx
import pytest

from shared.events import RequestFailed, RequestResumed, WorkerJoined, WorkerLost
from tests.e2e import clients, deploy
from tests.e2e.clients import Answer
from tests.e2e.deploy import Running
from tests.tiny import poison

pytestmark = pytest.mark.timeout(300)  # its worker starts several times
STREAMS: Final = 3
TOKENS: Final = 250
PARAMS: Final[dict[str, Any]] = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
TEXTS: Final = [f"Tell me a long story about {number} wizards." for number in range(STREAMS)]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return poison.environment(tmp_path_factory.mktemp("family"))


@pytest.fixture(scope="module")
def running(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("poison")
    told = ("--set", "recovery.worker_hung_s=2")
    with deploy.serve(folder, *told, model=str(poison.configuration(folder)), env=environment) as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed(running: Running) -> list[Answer]:
    """The answers of innocent requests without a death."""

    async def ask() -> list[Answer]:
        async with clients.http(running) as http:
            return await clients.answers(http, TEXTS, "undisturbed", at_once=STREAMS, **PARAMS)

    return asyncio.run(ask())


@asynccontextmanager
async def innocents(
    running: Running, name: str, undisturbed: list[Answer]
) -> AsyncGenerator[tuple[httpx.AsyncClient, list[Answer]], None]:
    """Streams after a tenth of each; after the block each has ended unchanged."""
    await clients.wait_until_ready(running)
    answers = [Answer(f"{name}-{number}", awaited_tokens=TOKENS // 10) for number in range(STREAMS)]
    async with clients.http(running) as http, asyncio.TaskGroup() as tasks:
        for answer, text in zip(answers, TEXTS, strict=True):
            tasks.create_task(clients.generate(http, answer, text, **PARAMS))
        for answer in answers:
            await answer.under_way.wait()
        yield http, answers
    for answer, expected in zip(answers, undisturbed, strict=True):
        assert answer.told == expected.told
        assert answer.end["usage"]["completion_tokens"] == len(answer.token_ids) == TOKENS
        assert answer.indices == list(range(len(answer.indices)))
    print(f"{name}: the longest stall was {max(answer.longest_stall_s for answer in answers):.2f} s")


async def ask_the_poison(http: httpx.AsyncClient, request_id: str, text: str) -> str:
    """Send the request; return the code of its error, before its first token or after some."""
    answer = await http.post("/generate", json=clients.body(text, request_id, **PARAMS))
    last = json.loads(answer.text.splitlines()[-1])
    code: str = last["error"]["code"] if "error" in last else last["metadata"]["code"]
    return code


async def test_poison_fails_alone_and_its_neighbours_come_to_their_end(
    running: Running, undisturbed: list[Answer], environment: dict[str, str]
) -> None:
    async with innocents(running, "neighbour", undisturbed) as (http, answers):
        code = await ask_the_poison(http, "poison", poison.kills(after=5))  # some tokens are out by then
    assert code == "poison_request"

    async with clients.reader(running) as reader:
        events = await reader.events("poison")
        [failed] = [event for event in events if isinstance(event, RequestFailed)]
        resumed = [event for event in events if isinstance(event, RequestResumed)]
        innocent = [event for answer in answers for event in await reader.events(answer.request_id)]
    assert failed.failure.status == 500
    assert [event.on_probation for event in resumed] == [True]  # two tries
    assert [event for event in innocent if isinstance(event, RequestResumed)]
    assert not [event for event in innocent if isinstance(event, RequestFailed)]
    await clients.wait_until_ready(running)
    replayed = clients.run_on(running, "replay", "--all", env=environment)
    assert replayed.returncode == 0, replayed.stdout


async def test_a_stopped_worker_is_given_up_ended_and_replaced_and_every_stream_goes_on(
    running: Running, undisturbed: list[Answer]
) -> None:
    await clients.wait_until_ready(running)
    stopped = running.pids.worker["0"]
    async with innocents(running, "stopped", undisturbed) as (_, answers):
        os.kill(stopped, signal.SIGSTOP)
        so_far = [len(answer.token_ids) for answer in answers]
    assert max(so_far) < TOKENS, "it was stopped too late to disturb anybody"

    assert running.pids.worker["0"] != stopped
    assert "worker-0 is killed: it was declared lost" in running.log()
    async with clients.reader(running) as reader:
        first, _ = await reader.until(reader.subjects.worker(0), WorkerJoined, lambda e: e.pid == stopped)
        lost_at, _ = await reader.until(
            reader.subjects.lost, WorkerLost, lambda event: event.incarnation == first
        )
        joined_at, _ = await reader.until(
            reader.subjects.worker(0), WorkerJoined, lambda e: e.pid == running.pids.worker["0"]
        )
    assert lost_at < joined_at


async def test_a_worker_whose_engine_hangs_is_heard_and_given_up_all_the_same(
    running: Running, undisturbed: list[Answer]
) -> None:
    """Its heartbeats continue, and it reads that it was declared lost; but its engine never returns."""
    await clients.wait_until_ready(running)
    hung = running.pids.worker["0"]
    async with innocents(running, "beside", undisturbed) as (http, _):
        assert await ask_the_poison(http, "hangs", poison.hangs()) == "poison_request"
    assert running.pids.worker["0"] != hung
