"""Qwen3-ASR over the command line: encoder and decoder on two ranks, one of which dies; routes and replay."""

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from shared.events import OutputChunk
from tests.e2e import clients, deploy
from tests.models.qwen3_asr.test_qwen3_asr import MOST, generated
from tests.models.whisper.served import wav
from tests.tiny.qwen3_asr import tiny_qwen3_asr
from tests.tiny.whisper import RATE, sound

SOUNDS = {"en": sound(2.1, 1), "de": sound(30.0, 2), "ja": sound(9.0, 3)}
OPTIONS = {"window_seconds": 4, "max_window_tokens": MOST}
FORMATS = ("json", "text", "srt", "vtt")


async def post(
    http: httpx.AsyncClient, code: str, route: str = "transcriptions", **fields: Any
) -> httpx.Response:
    return await http.post(
        f"/v1/audio/{route}",
        data={
            "model": "qwen",
            "response_format": "verbose_json",
            "options": json.dumps(OPTIONS),
            **fields,
        },
        files={"file": ("speech.wav", wav(SOUNDS[code]), "audio/wav")},
    )


async def ask(running: deploy.Running) -> dict[str, Any]:
    """Ask for all files at once, and end the decoder's rank when a part of one is written."""
    async with clients.http(running) as http, clients.reader(running) as reader:
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(post(http, code, language=code, request_id=code)) for code in SOUNDS]
            await reader.until(reader.subjects.outputs_of("de"), OutputChunk)
            pid = running.pids.worker["1"]
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
        return {
            "answers": [one.result().json() for one in asked],
            "detected": (await post(http, "en", prompt="wizards")).json(),
            "formats": {name: (await post(http, "en", response_format=name)).text for name in FORMATS},
            "stream": (await post(http, "en", response_format="json", stream="true")).text,
            "refused": [
                await post(http, "en", language="klingon"),
                await post(http, "en", "translations"),
                await post(http, "en", **{"timestamp_granularities[]": "word"}),
                await post(http, "en", options=json.dumps({"window_seconds": 1000})),
            ],
        }


@pytest.mark.timeout(200)
def test_files_in_three_languages_are_transcribed_and_replayed(tmp_path: Path) -> None:
    config = tmp_path / "qwen.yaml"
    config.write_text(
        f"model: qwen3_asr\ncheckpoint: {tiny_qwen3_asr()}\nmax_seq_len: 512\nnode_groups:\n"
        "  - {node_names: [listen, window, encoder], ranks: [0]}\n"
        "  - {node_names: [decoder, transcript, reader], ranks: [1]}\n"
    )
    with deploy.serve(tmp_path, model=str(config)) as running:
        found = asyncio.run(ask(running))
        verdicts = clients.verdicts(clients.run_on(running, "replay", "--all", "--json"))
        executed = clients.run_on(running, "replay", "ja", "--execute", "--config", str(config))
    for (code, samples), answer in zip(SOUNDS.items(), found["answers"], strict=True):
        assert answer["segments"][-1]["end"] == len(samples) / RATE
        for one in answer["segments"]:
            part = samples[round(one["start"] * RATE) : round(one["end"] * RATE)]
            assert one["tokens"] == generated(part, language=code)
    assert [answer["language"] for answer in found["answers"]] == ["english", "german", "japanese"]
    [segment] = found["detected"]["segments"]
    assert segment["tokens"] == generated(SOUNDS["en"], prompt="wizards")
    texts = found["formats"]
    plain = json.loads(texts["json"])["text"]
    assert texts["text"].strip() == plain
    assert "00:00:00,000 --> 00:00:02,100" in texts["srt"]
    assert "00:00:00.000 --> 00:00:02.100" in texts["vtt"]
    assert "transcript.text.done" in found["stream"]
    assert f'"text":{json.dumps(plain, ensure_ascii=False)}' in found["stream"]
    assert [(one.status_code, one.json()["error"]["code"]) for one in found["refused"]] == [
        (400, "unknown_language"),
        (400, "invalid_value"),
        (400, "invalid_value"),
        (400, "context_length_exceeded"),
    ]
    assert all(one["matches"] for one in verdicts.values()), verdicts
    assert "agree" in executed.stdout + executed.stderr
