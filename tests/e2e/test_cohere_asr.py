"""Cohere Transcribe over the command line: encoder and decoder on two ranks, one of which dies; replay."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from shared.events import OutputChunk
from tests.e2e import clients, deploy
from tests.models.cohere_asr.test_cohere_asr import generated
from tests.models.whisper.served import wav
from tests.tiny.cohere_asr import tiny_cohere_asr
from tests.tiny.whisper import RATE, sound

SOUNDS = {"en": sound(2.1, 1), "de": sound(30.0, 2), "ja": sound(9.0, 3)}


async def post(http: httpx.AsyncClient, code: str, **fields: Any) -> httpx.Response:
    return await http.post(
        "/v1/audio/transcriptions",
        data={"model": "cohere", "response_format": "verbose_json", **fields},
        files={"file": ("speech.wav", wav(SOUNDS[code]), "audio/wav")},
    )


async def ask(running: deploy.Running) -> tuple[list[dict[str, Any]], httpx.Response]:
    """Ask for all files at once, and end the decoder's rank when a part of one is written."""
    async with clients.http(running) as http, clients.reader(running) as reader:
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(post(http, code, language=code, request_id=code)) for code in SOUNDS]
            await reader.until(reader.subjects.outputs_of("de"), OutputChunk)
            pid = running.pids.worker["1"]
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
        return [one.result().json() for one in asked], await post(http, "en")


@pytest.mark.timeout(200)
def test_files_in_three_languages_are_transcribed_and_replayed(tmp_path: Path) -> None:
    config = tmp_path / "cohere.yaml"
    config.write_text(
        f"model: cohere_asr\ncheckpoint: {tiny_cohere_asr()}\nmax_seq_len: 512\nnode_groups:\n"
        "  - {node_names: [listen, window, encoder], ranks: [0]}\n"
        "  - {node_names: [decoder, transcript, reader], ranks: [1]}\n"
    )
    with deploy.serve(tmp_path, model=str(config)) as running:
        answers, refused = asyncio.run(ask(running))
        verdicts = clients.verdicts(clients.run_on(running, "replay", "--all", "--json"))
        executed = clients.run_on(running, "replay", "ja", "--execute", "--config", str(config))
    for (code, samples), answer in zip(SOUNDS.items(), answers, strict=True):
        assert answer["segments"][-1]["end"] == len(samples) / RATE
        for one in answer["segments"]:
            part = samples[round(one["start"] * RATE) : round(one["end"] * RATE)]
            assert one["tokens"] == generated(part, code)
    assert [len(answer["segments"]) for answer in answers] == [1, 9, 3]
    assert [answer["language"] for answer in answers] == ["english", "german", "japanese"]
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "unknown_language"
    assert all(one["matches"] for one in verdicts.values()), verdicts
    assert "agree" in executed.stdout + executed.stderr
