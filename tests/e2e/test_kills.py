"""Any role killed with -9 in the middle of 16 streams: every stream ends complete and unchanged.

Answers are long (random weights, `ignore_eos`), so that a kill after a quarter of each hits all of them in
the
middle; the tests assert that it did.
"""

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager

import pytest

from shared.events import NodeReady, OutputChunk, OutputFence, RequestAdmitted, RequestFinished
from tests.e2e import clients, deploy
from tests.e2e.clients import Answer
from tests.e2e.deploy import Running
from tests.tiny import tiny_checkpoint

STREAMS = 16
TOKENS = 200
TEXTS = [f"Tell me a long story about {number} wizards." for number in range(STREAMS)]
PARAMS = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One deployment for all kills; killed roles are restarted for the next."""
    with deploy.serve(tmp_path_factory.mktemp("kills"), model=str(tiny_checkpoint("qwen3"))) as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed(running: Running) -> list[Answer]:
    """The undisturbed answers."""

    async def ask() -> list[Answer]:
        async with clients.http(running) as http:
            return await clients.answers(http, TEXTS, "undisturbed", at_once=STREAMS, **PARAMS)

    return asyncio.run(ask())


@asynccontextmanager
async def in_the_middle(running: Running, name: str) -> AsyncGenerator[list[Answer], None]:
    """16 streams after a quarter of each; at the end of the block all of them have ended."""
    answers = [Answer(f"{name}-{number}", awaited_tokens=TOKENS // 4) for number in range(STREAMS)]
    async with clients.http(running) as http, asyncio.TaskGroup() as tasks:
        for answer, text in zip(answers, TEXTS, strict=True):
            tasks.create_task(clients.generate(http, answer, text, **PARAMS))
        for answer in answers:
            await answer.under_way.wait()
        yield answers


@pytest.mark.parametrize("killed", ["conductor", "worker", "nats", "conductor-and-worker"])
async def test_every_stream_survives_a_kill_complete_and_unchanged(
    killed: str, running: Running, undisturbed: list[Answer]
) -> None:
    roles = killed.split("-and-")
    pids = {role: pid_of(running, role) for role in roles}
    async with in_the_middle(running, killed) as answers:
        for pid in pids.values():
            os.kill(pid, signal.SIGKILL)
        so_far = [len(answer.token_ids) for answer in answers]
    assert max(so_far) < TOKENS, "the kill came too late to disturb anybody"
    for answer, expected in zip(answers, undisturbed, strict=True):
        assert answer.told == expected.told
        assert answer.end["usage"]["completion_tokens"] == len(answer.token_ids) == TOKENS
        assert answer.indices == list(range(len(answer.indices)))  # no chunk twice, none missing
    stall_s = max(answer.longest_stall_s for answer in answers)
    print(
        f"{killed}: killed after {min(so_far)} to {max(so_far)} tokens; the longest stall was {stall_s:.2f} s"
    )
    await clients.wait_until_ready(running)
    replayed = clients.run_on(running, "replay", "--all")
    assert replayed.returncode == 0, replayed.stdout
    assert all(pid_of(running, role) != pid for role, pid in pids.items())
    requests = [answer.request_id for answer in answers]
    if "worker" in roles:
        await assert_resumed(running, requests)
    if "conductor" in roles:
        await assert_succeeded(running, requests)


def pid_of(running: Running, role: str) -> int:
    pids = running.pids
    pid = {"conductor": pids.conductor[0], "worker": pids.worker["0"], "nats": pids.nats}[role]
    assert pid is not None
    return pid


async def assert_resumed(running: Running, requests: list[str]) -> None:
    """Assert that a second attempt continued after the released output, instead of starting anew."""
    async with clients.reader(running) as reader:
        for request_id in requests:
            events = await reader.events(request_id)
            fence = next(place for place, event in enumerate(events) if isinstance(event, OutputFence))
            before = [event for event in events[:fence] if isinstance(event, OutputChunk)]
            behind = [event for event in events[fence:] if isinstance(event, OutputChunk)]
            assert sum(len(chunk.token_ids) for chunk in before) > 0
            assert behind[0].attempt == 2
            assert behind[0].token_offset == sum(len(chunk.token_ids) for chunk in before)


async def assert_succeeded(running: Running, requests: list[str]) -> None:
    """Assert that a conductor of another epoch finished what the first had admitted."""
    async with clients.reader(running) as reader:
        for request_id in requests:
            events = await reader.events(request_id)
            [admitted] = [event.epoch for event in events if isinstance(event, RequestAdmitted)]
            finished = next(event.epoch for event in events if isinstance(event, RequestFinished))
            assert admitted is not None
            assert finished is not None
            assert finished > admitted


async def test_the_conductors_events_do_not_grow_with_the_tokens(running: Running) -> None:
    counts: dict[int, list[int]] = {}
    async with clients.http(running) as http, clients.reader(running) as reader:
        for tokens in (20, TOKENS):
            request_id = f"count-{tokens}"
            await clients.generate(http, Answer(request_id), TEXTS[0], **(PARAMS | {"max_tokens": tokens}))
            await reader.until(reader.subjects.walk(request_id), RequestFinished)
            events = await reader.events(request_id)
            counts[tokens] = [
                len(events),
                sum(event.writer == "conductor" for event in events),
                sum(isinstance(event, NodeReady) for event in events),
            ]
    print(f"events in all, of the conductor, orders: {counts}")
    assert counts[20][1:] == counts[TOKENS][1:] == [4, 2]
