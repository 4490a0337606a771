"""Transcripts over the real command line: many files at once, a worker that dies, refusals, replay.

Every transcript is that of transformers' `generate`.
"""

import asyncio
import json
import os
import signal
from dataclasses import dataclass, field
from typing import Any, Final

import httpx
import pytest

from shared.events import NodeReady, OutputChunk
from tests.e2e import clients, deploy
from tests.e2e.deploy import Running
from tests.models.whisper import oracle
from tests.models.whisper.served import Samples, wav
from tests.tiny.whisper import sound, tiny_whisper

pytestmark = pytest.mark.timeout(200)

LONG_S: Final = 14.0
SOUNDS: Final[dict[str, Samples]] = {
    "short": sound(1.6, 1),
    "longer": sound(5.3, 2),
    "german": sound(3.1, 3),
    "killed": sound(LONG_S, 4),
}
OFF: Final[dict[str, Any]] = {
    "no_speech_threshold": None,
    "compression_ratio_threshold": None,
    "logprob_threshold": None,
}
FORM: Final[dict[str, Any]] = {
    "model": "whisper-tiny",
    "response_format": "verbose_json",
    "timestamp_granularities[]": ["segment", "word"],
    "options": json.dumps(OFF),
}
REFUSED: Final[dict[str, tuple[dict[str, Any], bytes]]] = {
    "unknown_language": ({"language": "klingon"}, wav(SOUNDS["short"])),
    "invalid_media": ({}, wav(SOUNDS["longer"])[:60_000]),
    "media_too_large": ({}, wav(sound(31.0))),
    "invalid_value": ({"prompt": "<|endoftext|> over"}, wav(SOUNDS["short"])),
}


@dataclass(slots=True)
class Found:
    """The results of the deployment.

    Attributes:
        answers: by the name of the sound.
        refused: status and body, by the expected code.
        attempts: of the request whose worker was killed, the attempts of each walk of a window.
        verdicts, executed: of `dalsegno replay`.
    """

    answers: dict[str, dict[str, Any]] = field(default_factory=dict)
    refused: dict[str, tuple[int, dict[str, Any]]] = field(default_factory=dict)
    attempts: list[int] = field(default_factory=list)
    verdicts: dict[str, dict[str, Any]] = field(default_factory=dict)
    executed: str = ""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("transcriptions")
    config = folder / "whisper.yaml"
    config.write_text(
        f"model: whisper\ncheckpoint: {tiny_whisper()}\nname: whisper-tiny\nmax_seq_len: 512\n"
        "media: {max_seconds: 30}\nnode_groups:\n"
        "  - node_names: [listen, window, encoder, decoder, transcript, reader]\n    ranks: [0]\n"
    )
    with deploy.serve(folder, model=str(config)) as running:
        result = asyncio.run(ask(running))
        result.verdicts = clients.verdicts(clients.run_on(running, "replay", "--all", "--json"))
        executed = clients.run_on(running, "replay", "longer", "--execute", "--config", str(config))
        result.executed = executed.stdout + executed.stderr
    return result


async def ask(running: Running) -> Found:
    found = Found()
    async with clients.http(running) as http, clients.reader(running) as reader:
        async with asyncio.TaskGroup() as tasks:
            for name in ("short", "longer", "german"):
                tasks.create_task(keep(http, found, name))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(keep(http, found, "killed"))
            await reader.until(reader.subjects.outputs_of("killed"), OutputChunk)
            pid = running.pids.worker["0"]
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
        events = await reader.events("killed")
        found.attempts = [one.attempt for one in events if isinstance(one, NodeReady)]
        for code, (fields, file) in REFUSED.items():
            answer = await post(http, f"refused-{code}", file, **fields)
            found.refused[code] = answer.status_code, answer.json()
    return found


async def keep(http: httpx.AsyncClient, found: Found, name: str) -> None:
    fields = {"language": "de"} if name == "german" else {}
    answer = await post(http, name, wav(SOUNDS[name]), **fields)
    assert answer.status_code == 200, answer.text
    found.answers[name] = answer.json()


async def post(http: httpx.AsyncClient, name: str, file: bytes, **fields: Any) -> httpx.Response:
    form = {**FORM, "request_id": name, **fields}
    return await http.post(
        "/v1/audio/transcriptions", data=form, files={"file": ("speech.wav", file, "audio/wav")}
    )


@pytest.mark.parametrize("name", SOUNDS)
def test_transcripts_are_those_of_generate(found: Found, name: str) -> None:
    language = "de" if name == "german" else None
    given = oracle.generate(
        tiny_whisper(),
        SOUNDS[name],
        task="transcribe",
        language=language,
        return_timestamps=True,
        return_segments=True,
    )
    segments = found.answers[name]["segments"]
    assert [token for one in segments for token in one["tokens"]] == given["sequences"][0].tolist()
    assert found.answers[name]["duration"] == pytest.approx(len(SOUNDS[name]) / 16_000, abs=1e-3)
    assert {one["seek"] for one in segments} > {0}
    assert found.answers[name]["words"]


def test_a_killed_request_goes_on_with_its_window(found: Found) -> None:
    windows = {one["seek"] for one in found.answers["killed"]["segments"]}
    assert {*found.attempts} == {1, 2}
    assert found.attempts.count(1) > 1
    assert len(found.attempts) < 2 * len(windows), "no window before the crash is ordered again"


@pytest.mark.parametrize("code", REFUSED)
def test_what_cannot_be_is_refused_by_name(found: Found, code: str) -> None:
    status, body = found.refused[code]
    assert 400 <= status < 500
    assert body["error"]["code"] == code, body


def test_every_request_replays(found: Found) -> None:
    assert {*SOUNDS} <= found.verdicts.keys()
    assert all(one["matches"] for one in found.verdicts.values()), found.verdicts
    assert "agree" in found.executed, found.executed
