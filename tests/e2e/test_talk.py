"""A model whose talker is fed by its thinker, served: it says the same after a kill, and replays.

That it says what transformers does is tested in `tests.workers.test_talk_over_ranks`.
"""

import asyncio
import base64
import json
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.e2e import clients, deploy
from tests.tiny import talk

TOKENS, FRAMES = 16, 24
TEXTS = talk.TEXTS[:2]


@dataclass
class Heard:
    """An answer: text, codes and sound.

    Attributes:
        begun: some codes have come.
    """

    tokens: list[int] = field(default_factory=list)
    codes: list[list[int]] = field(default_factory=list)
    samples: int = 0
    begun: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, line: dict[str, Any]) -> None:
        data = base64.b64decode(line["data"])
        match line["modality"]:
            case "text":
                self.tokens += [int(token) for token in data.split()]
            case "codes":
                self.codes += np.frombuffer(data, "<i4").reshape(-1, 4).tolist()
                self.begun.set()
            case _:
                self.samples += len(data) // 4


async def ask(client: httpx.AsyncClient, request_id: str, text: str, heard: Heard) -> Heard:
    body = clients.body(text, request_id, max_tokens=TOKENS, frames=FRAMES, temperature=0)
    async with client.stream("POST", "/generate", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            heard.take(json.loads(line))
    return heard


@pytest.mark.slow
async def test_talk_survives_its_worker_and_replays(tmp_path: Path) -> None:
    config, environment = str(talk.configuration(tmp_path)), talk.environment(tmp_path)
    with deploy.serve(tmp_path, model=config, env=environment) as running:
        pid = running.pids.worker["0"]
        assert pid is not None
        async with clients.http(running) as client:
            alone = [await ask(client, f"alone-{n}", text, Heard()) for n, text in enumerate(TEXTS)]
            heard = [Heard() for _ in TEXTS]
            async with asyncio.TaskGroup() as tasks:
                for number, text in enumerate(TEXTS):
                    tasks.create_task(ask(client, f"killed-{number}", text, heard[number]))
                await heard[1].begun.wait()
                assert len(heard[1].codes) < FRAMES
                os.kill(pid, signal.SIGKILL)

        for before, after in zip(alone, heard, strict=True):
            assert (after.tokens, after.codes) == (before.tokens, before.codes)
            assert after.samples == before.samples
        assert alone[0].codes != alone[1].codes
        replayed = clients.run_on(
            running, "replay", "killed-1", "--execute", "--config", config, env=environment
        )
        assert replayed.returncode == 0, replayed.stdout
