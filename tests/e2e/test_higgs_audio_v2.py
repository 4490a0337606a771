"""Higgs Audio v2 by OpenAI's route and SDK: several at once, a worker that dies in the middle, replay.

That codes and sound are those of transformers is tested in `tests.models.higgs_audio_v2`.
"""

import asyncio
import base64
import json
import os
import signal
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import openai
import pytest
import torch

from configs.files import configs_folder
from tests.e2e import clients, deploy
from tests.models.higgs_audio_v2 import serving
from tests.tiny import higgs_audio
from tests.tiny.higgs_audio import HOP, tiny_higgs_audio

FRAME: Final = 2 * HOP
"""The bytes of a frame."""
STEPS: Final = 130
FRAMES: Final = STEPS - 4
"""The first step has no codes, and the longest delay is 3."""
ASKED: Final = ("hello there", "how are you?", "[SPEAKER0] what? [SPEAKER1] seven wizards")


def speech(text: str, **more: Any) -> dict[str, Any]:
    asked: dict[str, Any] = {"model": "higgs_audio_v2", "input": text, "response_format": "pcm"}
    return {**asked, "temperature": 0, "seed": 5, "max_tokens": STEPS, **more}


async def hear(client: httpx.AsyncClient, text: str, begun: asyncio.Event | None = None) -> tuple[bytes, str]:
    """The samples of an answer, and its request's id; `begun` is set with the first of them."""
    found = b""
    async with client.stream("POST", "/v1/audio/speech", json=speech(text)) as response:
        assert response.status_code == 200, await response.aread()
        async for piece in response.aiter_bytes():
            found += piece
            if begun is not None and piece:
                begun.set()
    return found, response.headers["x-dalsegno-request-id"]


async def by_sdk(running: deploy.Running) -> bytes:
    """The samples by OpenAI's own client, and what it says of a voice that is unknown."""
    async with openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="x") as sdk:
        with pytest.raises(openai.BadRequestError, match="voice: expected one of auto"):
            await sdk.audio.speech.create(model="higgs_audio_v2", input="hello", voice="alloy")
        answer = await sdk.audio.speech.create(
            model="higgs_audio_v2",
            input=ASKED[1],
            voice="auto",
            response_format="pcm",
            extra_body={"temperature": 0, "seed": 5, "max_tokens": STEPS},
        )
        return answer.content


def spoken() -> Any:
    """What transformers says, as 16-bit samples."""
    prompt = serving.prompt_of(serving.Asked("hello there", options={"scene": "a cave"}))
    said = higgs_audio.spoken(prompt, steps=STEPS, seed=5)
    return (higgs_audio.sound(said).clamp(-1, 1) * 32767).to(torch.int16).numpy().astype(int)


async def generated(client: httpx.AsyncClient) -> bytes:
    """The samples of an answer in a scene by `/generate`, and what it says of wrong options."""

    def body(**options: Any) -> dict[str, Any]:
        how = {"max_tokens": STEPS, "temperature": 0, "seed": 5, **options}
        return {"text": "hello there", "output_modalities": ["audio"], "model_kwargs": how}

    for wrong in ({"initial_codec_chunk_frames": 99}, {"scenery": 3}, {"min_p": 0.5}):
        refused = await client.post("/generate", json=body(**wrong))
        assert refused.status_code == 400, refused.text
        assert next(iter(wrong)) in refused.json()["error"]["message"]
    answer = await client.post("/generate", json=body(scene="a cave"))
    assert answer.status_code == 200, answer.text
    lines = [json.loads(line) for line in answer.text.splitlines() if line]
    return b"".join(base64.b64decode(one["data"]) for one in lines if one.get("modality") == "audio")


@pytest.mark.slow
async def test_speech_survives_its_worker_and_replays(tmp_path: Path) -> None:
    placement = (configs_folder() / "higgs_audio_v2.yaml").read_text()
    config = tmp_path / "higgs_audio_v2.yaml"
    config.write_text(
        f"{placement.replace('2048', '512')}kv_tokens: 2400\ncheckpoint: {tiny_higgs_audio()}\n"
    )
    with deploy.serve(tmp_path, model=str(config)) as running:
        async with clients.http(running) as client:
            alone = [(await hear(client, asked))[0] for asked in ASKED]
            begun = asyncio.Event()
            async with asyncio.TaskGroup() as tasks:
                heard = [tasks.create_task(hear(client, asked, begun=begun)) for asked in ASKED]
                await begun.wait()
                pid = running.pids.worker["0"]
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
            by_route = await generated(client)
            mp3 = speech(ASKED[0]) | {"response_format": "mp3"}
            encoded = (await client.post("/v1/audio/speech", json=mp3)).content
            listed = (await client.get("/v1/models")).json()["data"][0]
        assert [task.result()[0] for task in heard] == alone
        assert await clients.attempts_of(running, [task.result()[1] for task in heard]) == {1, 2}
        assert [len(one) for one in alone] == [FRAMES * FRAME] * len(ASKED)
        assert len(set(alone)) == len(ASKED)
        assert await by_sdk(running) == alone[1]
        assert listed["voices"] == ["auto"]
        np.testing.assert_allclose(np.frombuffer(by_route, "<i2").astype(int), spoken(), atol=1)
        assert encoded[:3] == b"ID3" or encoded[0] == 0xFF
        replayed = clients.run_on(
            running, "replay", heard[1].result()[1], "--execute", "--config", str(config)
        )
        assert replayed.returncode == 0, replayed.stdout
