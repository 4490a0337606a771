"""Language models that hear, over the command line: encoder and decoder on two ranks, one dies; replay."""

import asyncio
import json
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from shared.events import OutputChunk
from tests.e2e import clients, deploy
from tests.models.qwen3_asr import test_qwen3_asr as qwen3_asr
from tests.models.voxtral import test_voxtral as voxtral
from tests.models.whisper.served import Samples, wav
from tests.tiny.qwen3_asr import tiny_qwen3_asr
from tests.tiny.voxtral import tiny_voxtral
from tests.tiny.whisper import RATE, sound

MOST: Final = 12
SOUNDS = {"en": sound(2.1, 1), "de": sound(30.0, 2), "ja": sound(9.0, 3)}
OPTIONS = {"window_seconds": 4, "max_window_tokens": MOST}
FORMATS = ("json", "text", "srt", "vtt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family, and what it is tried with.

    Attributes:
        name: of the family.
        checkpoint: writes the tiny one.
        generated: the tokens of samples in a language by transformers; without one it is detected.
        killed: the rank that dies.
        refused: further form fields that are refused, and the code.
    """

    name: str
    checkpoint: Callable[[], Path]
    generated: Callable[[Samples, str | None], list[int]]
    killed: str
    refused: tuple[dict[str, str], str]


FAMILIES: Final = (
    Family(
        name="qwen3_asr",
        checkpoint=tiny_qwen3_asr,
        generated=lambda samples, code: qwen3_asr.generated(samples, language=code),
        killed="1",
        refused=({"prompt": "<|audio_pad|>"}, "media_mismatch"),
    ),
    Family(
        name="voxtral",
        checkpoint=tiny_voxtral,
        generated=lambda samples, code: voxtral.generated(samples, code=code),
        killed="0",
        refused=({"prompt": "wizards"}, "not_supported"),
    ),
)


async def post(
    http: httpx.AsyncClient, code: str, route: str = "transcriptions", **fields: Any
) -> httpx.Response:
    return await http.post(
        f"/v1/audio/{route}",
        data={
            "model": "hearing",
            "response_format": "verbose_json",
            "options": json.dumps(OPTIONS),
            **fields,
        },
        files={"file": ("speech.wav", wav(SOUNDS[code]), "audio/wav")},
    )


async def ask(running: deploy.Running, family: Family) -> dict[str, Any]:
    """Ask for all files at once, and end a rank when a part of one is written."""
    async with clients.http(running) as http, clients.reader(running) as reader:
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(post(http, code, language=code, request_id=code)) for code in SOUNDS]
            await reader.until(reader.subjects.outputs_of("de"), OutputChunk)
            pid = running.pids.worker[family.killed]
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
        return {
            "answers": [one.result().json() for one in asked],
            "detected": (await post(http, "en")).json(),
            "formats": {name: (await post(http, "en", response_format=name)).text for name in FORMATS},
            "stream": (await post(http, "en", response_format="json", stream="true")).text,
            "refused": [
                await post(http, "en", language="klingon"),
                await post(http, "en", "translations"),
                await post(http, "en", **{"timestamp_granularities[]": "word"}),
                await post(http, "en", options=json.dumps({"window_seconds": 1000})),
                await post(http, "en", **family.refused[0]),
            ],
        }


@pytest.mark.timeout(200)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_files_in_three_languages_are_transcribed_and_replayed(family: Family, tmp_path: Path) -> None:
    config = tmp_path / "hearing.yaml"
    config.write_text(
        f"model: {family.name}\ncheckpoint: {family.checkpoint()}\nmax_seq_len: 512\nnode_groups:\n"
        "  - {node_names: [listen, window, encoder], ranks: [0]}\n"
        "  - {node_names: [decoder, transcript, reader], ranks: [1]}\n"
    )
    with deploy.serve(tmp_path, model=str(config)) as running:
        found = asyncio.run(ask(running, family))
        verdicts = clients.verdicts(clients.run_on(running, "replay", "--all", "--json"))
        executed = clients.run_on(running, "replay", "ja", "--execute", "--config", str(config))
    for (code, samples), answer in zip(SOUNDS.items(), found["answers"], strict=True):
        assert answer["segments"][-1]["end"] == len(samples) / RATE
        for one in answer["segments"]:
            part = samples[round(one["start"] * RATE) : round(one["end"] * RATE)]
            assert one["tokens"] == family.generated(part, code)
    assert [answer["language"] for answer in found["answers"]] == ["english", "german", "japanese"]
    [segment] = found["detected"]["segments"]
    assert segment["tokens"] == family.generated(SOUNDS["en"], None)
    texts = found["formats"]
    plain = json.loads(texts["json"])["text"]
    assert texts["text"].strip() == plain
    assert "00:00:00,000 --> 00:00:02,100" in texts["srt"]
    assert "00:00:00.000 --> 00:00:02.100" in texts["vtt"]
    assert f'"text":{json.dumps(plain, ensure_ascii=False)}' in found["stream"]
    assert [(one.status_code, one.json()["error"]["code"]) for one in found["refused"]] == [
        (400, "unknown_language"),
        (400, "not_supported"),
        (400, "invalid_value"),
        (400, "context_length_exceeded"),
        (400, family.refused[1]),
    ]
    assert all(one["matches"] for one in verdicts.values()), verdicts
    assert "agree" in executed.stdout + executed.stderr
