"""The leading conductor is killed with -9, or stopped, while clients stream: its follower takes over.

The printed time is the time without a leader: from the signal to the successor's epoch, by the log's clock.
"""

import asyncio
import os
import signal
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager

import pytest

from shared.events import EpochOpened, RequestFinished, decode
from shared.log.port import StoredRecord
from tests.e2e import clients, deploy
from tests.e2e.clients import Answer
from tests.e2e.deploy import Running
from tests.tiny import tiny_checkpoint

STREAMS = 4
TOKENS = 400
TEXTS = [f"Tell me a long story about {number} wizards." for number in range(STREAMS)]
PARAMS = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    two = ("--set", "recovery.conductors=2")
    folder = tmp_path_factory.mktemp("take-over")
    with deploy.serve(folder, *two, model=str(tiny_checkpoint("qwen3"))) as running:
        yield running


@asynccontextmanager
async def in_the_middle(running: Running, name: str) -> AsyncGenerator[list[Answer], None]:
    """Streams after their first chunk; at the end of the block all of them have ended."""
    answers = [Answer(f"{name}-{number}", awaited_tokens=TOKENS // 8) for number in range(STREAMS)]
    async with clients.http(running) as http, asyncio.TaskGroup() as tasks:
        for answer, text in zip(answers, TEXTS, strict=True):
            tasks.create_task(clients.generate(http, answer, text, **PARAMS))
        for answer in answers:
            await answer.under_way.wait()
        yield answers


async def conductors(running: Running) -> dict[int, str]:
    """The state of each conductor in its heartbeat, by pid."""
    async with clients.http(running) as http:
        found = (await http.get("/health")).json()["conductors"].values()
    return {one["pid"]: one["state"] for one in found if one["silent_s"] < 1.0}


async def leader_of(running: Running) -> int:
    """The pid of the leading conductor, once one leads and the other follows."""
    async with asyncio.timeout(clients.PATIENCE_S):
        states: dict[int, str] = {}
        while sorted(states.values()) != ["following", "leading"]:
            await asyncio.sleep(0.05)  # health is asked, it does not tell
            states = await conductors(running)
    return next(pid for pid, state in states.items() if state == "leading")


async def next_epoch(reader: clients.Reader, behind: int) -> StoredRecord:
    """The first epoch that was opened after a position."""
    async for record in reader.log.read([reader.subjects.epoch], behind + 1):
        return record
    raise AssertionError("the log ended")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_the_stand_by_leads_and_no_stream_shows_it(how: signal.Signals, running: Running) -> None:
    leader = await leader_of(running)
    async with clients.reader(running) as reader, in_the_middle(running, how.name) as answers:
        behind = (await reader.log.state()).last_seq
        at_ns = time.time_ns()
        os.kill(leader, how)
        opened = await next_epoch(reader, behind)
        if how is signal.SIGSTOP:  # it believes that it leads, and learns otherwise
            os.kill(leader, signal.SIGCONT)
    print(f"{how.name}: nobody led for {(opened.time_ns - at_ns) / 1e9:.2f} s")

    for answer in answers:
        assert len(answer.token_ids) == answer.end["usage"]["completion_tokens"] == TOKENS
        assert answer.indices == list(range(len(answer.indices)))  # no chunk twice, none missing
    event = decode(opened.data)
    assert isinstance(event, EpochOpened)
    epoch = event.epoch
    async with clients.reader(running) as reader:
        for answer in answers:
            events = await reader.events(answer.request_id)
            ends = [one.epoch for one in events if isinstance(one, RequestFinished)]
            assert ends.count(epoch) == 1  # of one that was deposed there may be another, which is void
            assert max(one or 0 for one in ends) == epoch
    assert await leader_of(running) != leader
    if how is signal.SIGSTOP:
        assert (await conductors(running))[leader] == "following"
    replayed = clients.run_on(running, "replay", "--all")
    assert replayed.returncode == 0, replayed.stdout


async def test_whoever_is_told_to_end_hands_over_at_once(running: Running) -> None:
    leader = await leader_of(running)
    async with clients.reader(running) as reader, in_the_middle(running, "told") as answers:
        behind = (await reader.log.state()).last_seq
        at_ns = time.time_ns()
        os.kill(leader, signal.SIGTERM)
        opened = await next_epoch(reader, behind)
    print(f"SIGTERM: nobody led for {(opened.time_ns - at_ns) / 1e9:.2f} s")
    assert all(len(answer.token_ids) == TOKENS for answer in answers)
    assert "the leader has left: claiming the next epoch" in running.log()
