"""Clients open every reader that the log may have, and fight for more, while the conductor is killed.

By default a stream has 1,000 consumers. A conductor that waited for one would never lead again.
"""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shared.subjects import Subjects
from tests.e2e import clients, deploy
from tests.e2e.clients import Answer
from tests.e2e.deploy import Running
from tests.shared.log.greedy import greedy_readers
from tests.tiny import tiny_checkpoint

READERS = 1_000
PER_KEY = 64
KILLS = 2
ROLES = ("reader", "client")


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    limits = [f"nats.max_consumers={READERS}", f"nats.max_consumers_per_key={PER_KEY}"]
    options = [word for limit in limits for word in ("--set", limit)]
    with deploy.serve(tmp_path, *options, model=str(tiny_checkpoint("qwen3"))) as running:
        yield running


async def answered(running: Running, request_id: str) -> Answer:
    answer = Answer(request_id)
    async with clients.http(running) as http, asyncio.timeout(clients.PATIENCE_S):
        await clients.generate(http, answer, "Hello.", temperature=0, max_tokens=8, ignore_eos=True)
    return answer


async def conductor_after(running: Running, pid: int) -> int:
    """The pid of the conductor that leads after the one with `pid`."""
    async with clients.http(running) as http, asyncio.timeout(clients.PATIENCE_S):
        while True:
            found = (await http.get("/health")).json()["conductors"].values()
            for one in found:
                if one["state"] == "leading" and one["pid"] != pid and one["silent_s"] < 1.0:
                    return int(one["pid"])
            await asyncio.sleep(0.05)  # health is asked, it does not tell


async def alarmed(running: Running) -> None:
    """Return once `/health` warns about the number of readers."""
    async with clients.http(running) as http, asyncio.timeout(clients.PATIENCE_S):
        log: dict[str, Any] = {}
        while "one reader per service" not in log.get("warning", ""):
            await asyncio.sleep(0.01)  # the readers that were ended are being opened again
            log = (await http.get("/health")).json()["log"]
        assert log["max_readers"] == READERS
        metrics = (await http.get("/metrics")).text
    assert f"dalsegno_log_max_readers {READERS}.0" in metrics
    assert "dalsegno_conductor_ended_readers_total" in metrics


async def limited(running: Running) -> None:
    """Return once the conductor has said that it ended readers of both keys."""
    told: list[str] = []
    async with asyncio.timeout(clients.PATIENCE_S):
        while len(told) < len(ROLES):
            await asyncio.sleep(0.05)  # another process writes it
            log = running.log()
            told = [role for role in ROLES if f"readers of _INBOX_{role}: a key may have 64" in log]


async def test_a_killed_conductor_leads_again_although_no_reader_is_left(running: Running) -> None:
    subjects = Subjects(running.prefix)
    await answered(running, "before")
    async with (
        greedy_readers(running.nats_url, running.reader, subjects.stream) as reader,
        greedy_readers(running.nats_url, running.client, subjects.stream) as client,
    ):
        async with asyncio.timeout(clients.PATIENCE_S):
            await reader.is_full.wait()
        pid = running.pids.conductor[0]
        for number in range(KILLS):
            os.kill(pid, signal.SIGKILL)
            pid = await conductor_after(running, pid)
            answer = await answered(running, f"after-{number}")
            assert len(answer.token_ids) == 8
        assert reader.refused + client.refused > 0
        await alarmed(running)
        await limited(running)
    assert "reads by single requests" in running.log()
