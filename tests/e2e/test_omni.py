"""Qwen3-Omni and Qwen2.5-Omni, served on several ranks: answers at once, a rank that dies while it speaks.

Text is that of transformers; that speech is, too, is tested in `tests.models.qwen3_omni` and `.qwen2_5_omni`.
"""

import asyncio
import base64
import json
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import httpx
import msgspec
import pytest
import torch

from configs.files import configs_folder
from models.sequence_request import PrepareRequest
from shared.events import Inputs, Params
from shared.tensors import read_ids
from tests.e2e import clients, deploy
from tests.models.qwen2_5_omni import serving as qwen2_5
from tests.models.qwen3_omni import serving as qwen3
from tests.tiny import omni, qwen2_5_omni

TOKENS: Final = 12
FRAMES: Final = {"qwen3_omni": 60, "qwen2_5_omni": 120}
TEXTS: Final = ("hello there", "what does len do?", "once upon a time")
GREEDY: Final = {
    "seed": 7,  # of the noise that Qwen2.5-Omni makes sound of
    "temperature": 0,
    "talker_temperature": 0,
    "talker_repetition_penalty": 1.0,
    "max_tokens": TOKENS,
}


@dataclass(frozen=True)
class Case:
    """A placement, and the rank of it that is killed."""

    family: Literal["qwen3_omni", "qwen2_5_omni"]
    placement: str
    killed: str
    voice: str = "Ethan"

    @property
    def checkpoint(self) -> Path:
        return omni.tiny_omni() if self.family == "qwen3_omni" else qwen2_5_omni.tiny_qwen2_5_omni()

    def text(self, text: str) -> str:
        """What transformers answers, greedily."""
        served, model = (
            (qwen3.SERVED, omni.oracle())
            if self.family == "qwen3_omni"
            else (qwen2_5.SERVED, qwen2_5_omni.oracle())
        )
        inputs = Inputs(text=text, output_modalities=["text", "audio"])
        args = msgspec.to_builtins(PrepareRequest(inputs=inputs, params=Params()))
        ids = read_ids(served.prepares.run("prepare", "k", {}, args).handle("token_ids"))
        found = model.thinker.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
            max_new_tokens=TOKENS,
            do_sample=False,
            eos_token_id=[*served.prepares.eos_ids],
        )
        return served.text_of(found[0, len(ids) :].tolist())


CASES: Final = (
    Case("qwen3_omni", "qwen3omni_2gpu", killed="0"),
    Case("qwen3_omni", "qwen3omni_thinker_tp2", killed="1"),
    Case("qwen2_5_omni", "qwen2_5_omni", killed="0"),
)


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
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.placement)
async def test_speech_survives_its_rank_and_replays(tmp_path: Path, case: Case) -> None:
    placement = (configs_folder() / f"{case.placement}.yaml").read_text()
    frames = {"talker_max_output_tokens": FRAMES[case.family]}
    config = tmp_path / "omni.yaml"
    config.write_text(f"{placement.replace('32768', '1024')}checkpoint: {case.checkpoint}\n")
    with deploy.serve(tmp_path, model=str(config)) as running:
        async with clients.http(running) as client:
            alone = [await ask(client, f"alone-{n}", text, Heard(), **frames) for n, text in enumerate(TEXTS)]
            heard = [Heard() for _ in TEXTS]
            async with asyncio.TaskGroup() as tasks:
                for number, text in enumerate(TEXTS):
                    tasks.create_task(ask(client, f"killed-{number}", text, heard[number], **frames))
                await heard[0].begun.wait()
                assert len(heard[0].sound) < len(alone[0].sound)
                pid = running.pids.worker[case.killed]
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
            refused = await client.post(
                "/generate",
                json=clients.body("hi", "unknown", voice="nobody") | {"output_modalities": ["audio"]},
            )
        assert [one.text.decode() for one in alone] == [case.text(text) for text in TEXTS]
        for before, after in zip(alone, heard, strict=True):
            assert (after.text, after.sound) == (before.text, before.sound)
        assert len({one.sound for one in alone}) == len(TEXTS)
        assert refused.status_code == 400
        assert case.voice in refused.text
        replayed = clients.run_on(running, "replay", "killed-1", "--execute", "--config", str(config))
        assert replayed.returncode == 0, replayed.stdout
