"""Qwen3-Omni, served on M*'s two ranks: several answers at once, a rank that dies in the middle of speech.

That text and speech are those of transformers is tested in `tests.models.qwen3_omni`.
"""

import asyncio
import base64
import json
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from configs.files import configs_folder
from tests.e2e import clients, deploy
from tests.tiny import omni

TOKENS: Final = 12
FRAMES: Final = 60
TEXTS: Final = ("hello there", "what does len do?", "once upon a time")
GREEDY: Final = {
    "temperature": 0,
    "talker_temperature": 0,
    "talker_repetition_penalty": 1.0,
    "talker_max_output_tokens": FRAMES,
    "max_tokens": TOKENS,
}


@dataclass
class Heard:
    """An answer: text and sound, in the order of its chunks."""

    text: bytes = b""
    sound: bytes = b""
    order: list[str] = field(default_factory=list)
    begun: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, line: dict[str, Any]) -> None:
        data = base64.b64decode(line["data"])
        self.order += [line["modality"]] if data else []
        if line["modality"] == "text":
            self.text += data
        elif line["modality"] == "audio" and data:
            self.sound += data
            self.begun.set()


async def ask(client: httpx.AsyncClient, request_id: str, text: str, heard: Heard, **more: Any) -> Heard:
    body = clients.body(text, request_id, **GREEDY, **more)
    body["output_modalities"] = ["text", "audio"]
    async with client.stream("POST", "/generate", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            heard.take(json.loads(line))
    return heard


@pytest.mark.slow
async def test_speech_survives_its_rank_and_replays(tmp_path: Path) -> None:
    placement = (configs_folder() / "qwen3omni_2gpu.yaml").read_text()
    config = tmp_path / "omni.yaml"
    config.write_text(f"{placement.replace('32768', '1024')}checkpoint: {omni.tiny_omni()}\n")
    with deploy.serve(tmp_path, model=str(config)) as running:
        async with clients.http(running) as client:
            alone = [await ask(client, f"alone-{n}", text, Heard()) for n, text in enumerate(TEXTS)]
            heard = [Heard() for _ in TEXTS]
            async with asyncio.TaskGroup() as tasks:
                for number, text in enumerate(TEXTS):
                    tasks.create_task(ask(client, f"killed-{number}", text, heard[number]))
                await heard[0].begun.wait()
                assert len(heard[0].sound) < len(alone[0].sound)
                pid = running.pids.worker["0"]
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
            refused = await client.post(
                "/generate",
                json=clients.body("hi", "unknown", voice="nobody") | {"output_modalities": ["audio"]},
            )
        for before, after in zip(alone, heard, strict=True):
            assert (after.text, after.sound) == (before.text, before.sound)
        assert len({one.sound for one in alone}) == len(TEXTS)
        assert refused.status_code == 400
        assert "Ethan" in refused.text
        replayed = clients.run_on(running, "replay", "killed-1", "--execute", "--config", str(config))
        assert replayed.returncode == 0, replayed.stdout
