"""Cohere Transcribe over the real command line: files at once, a language that is missing, replay."""

import asyncio
from typing import Any

import httpx
import pytest

from tests.e2e import clients, deploy
from tests.models.cohere_asr.test_cohere_asr import generated
from tests.models.whisper.served import wav
from tests.tiny.cohere_asr import tiny_cohere_asr
from tests.tiny.whisper import RATE, sound

SOUNDS = {"en": sound(2.1, 1), "de": sound(9.0, 2)}


async def post(http: httpx.AsyncClient, code: str, **fields: Any) -> httpx.Response:
    return await http.post(
        "/v1/audio/transcriptions",
        data={"model": tiny_cohere_asr().name, "response_format": "verbose_json", **fields},
        files={"file": ("speech.wav", wav(SOUNDS[code]), "audio/wav")},
    )


async def ask(running: deploy.Running) -> tuple[list[dict[str, Any]], httpx.Response]:
    async with clients.http(running) as http:
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(post(http, code, language=code, request_id=code)) for code in SOUNDS]
        return [one.result().json() for one in asked], await post(http, "en")


@pytest.mark.timeout(200)
def test_files_in_two_languages_are_transcribed_and_replayed(tmp_path: Any) -> None:
    with deploy.serve(tmp_path, model=str(tiny_cohere_asr())) as running:
        answers, refused = asyncio.run(ask(running))
        verdicts = clients.verdicts(clients.run_on(running, "replay", "--all", "--json"))
        executed = clients.run_on(running, "replay", "de", "--execute", "--config", str(tiny_cohere_asr()))
    for code, answer in zip(SOUNDS, answers, strict=True):
        for one in answer["segments"]:
            part = SOUNDS[code][round(one["start"] * RATE) : round(one["end"] * RATE)]
            assert one["tokens"] == generated(part, code)
    assert [len(answer["segments"]) > 1 for answer in answers] == [False, True]
    assert [answer["language"] for answer in answers] == ["english", "german"]
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "unknown_language"
    assert all(one["matches"] for one in verdicts.values()), verdicts
    assert "agree" in executed.stdout + executed.stderr
