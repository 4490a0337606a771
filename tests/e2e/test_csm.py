"""CSM by OpenAI's route and SDK: several voices at once, a worker that dies in the middle of speech, replay.

That codes and sound are those of transformers is tested in `tests.models.csm`.
"""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any, Final

import httpx
import openai
import pytest

from configs.files import configs_folder
from tests.e2e import clients, deploy
from tests.tiny.csm import tiny_csm

FRAME: Final = 2 * 1920
"""The bytes of a frame."""
FRAMES: Final = 75
ASKED: Final = (("hello there", "0"), ("hello there", "1"), ("what do seven wizards mix?", "7"))


def speech(text: str, voice: str, **more: Any) -> dict[str, Any]:
    asked: dict[str, Any] = {"model": "csm", "input": text, "voice": voice, "response_format": "pcm"}
    return {**asked, "temperature": 0, "max_tokens": FRAMES, **more}


async def hear(
    client: httpx.AsyncClient, text: str, voice: str, begun: asyncio.Event | None = None
) -> tuple[bytes, str]:
    """The samples of an answer, and its request's id; `begun` is set with the first of them."""
    found = b""
    async with client.stream("POST", "/v1/audio/speech", json=speech(text, voice)) as response:
        assert response.status_code == 200, await response.aread()
        async for piece in response.aiter_bytes():
            found += piece
            if begun is not None and piece:
                begun.set()
    return found, response.headers["x-dalsegno-request-id"]


async def by_sdk(running: deploy.Running) -> bytes:
    """The samples by OpenAI's own client, and what it says of a voice that is unknown."""
    async with openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="x") as sdk:
        with pytest.raises(openai.BadRequestError, match="voice: expected one of 0, 1"):
            await sdk.audio.speech.create(model="csm", input="hello", voice="alloy")
        answer = await sdk.audio.speech.create(
            model="csm",
            input=ASKED[1][0],
            voice=ASKED[1][1],
            response_format="pcm",
            extra_body={"temperature": 0, "max_tokens": FRAMES},
        )
        return answer.content


@pytest.mark.slow
async def test_speech_survives_its_worker_and_replays(tmp_path: Path) -> None:
    placement = (configs_folder() / "csm.yaml").read_text()
    config = tmp_path / "csm.yaml"
    config.write_text(f"{placement.replace('2048', '512')}checkpoint: {tiny_csm()}\n")
    with deploy.serve(tmp_path, model=str(config)) as running:
        async with clients.http(running) as client:
            alone = [(await hear(client, *asked))[0] for asked in ASKED]
            begun = asyncio.Event()
            async with asyncio.TaskGroup() as tasks:
                heard = [tasks.create_task(hear(client, *asked, begun=begun)) for asked in ASKED]
                await begun.wait()
                pid = running.pids.worker["0"]
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
            listed = (await client.get("/v1/models")).json()["data"][0]
        assert [task.result()[0] for task in heard] == alone
        assert await clients.attempts_of(running, [task.result()[1] for task in heard]) == {1, 2}
        assert [len(one) for one in alone] == [FRAMES * FRAME] * len(ASKED)
        assert len(set(alone)) == len(ASKED)
        assert await by_sdk(running) == alone[1]
        assert "7" in listed["voices"]
        replayed = clients.run_on(
            running, "replay", heard[1].result()[1], "--execute", "--config", str(config)
        )
        assert replayed.returncode == 0, replayed.stdout
