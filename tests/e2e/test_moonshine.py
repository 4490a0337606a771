"""Moonshine over the real command line: files of different lengths at once, a worker that dies, replay.

Every transcript is that of transformers' `generate`.
"""

import asyncio
import base64
import os
import signal
from dataclasses import dataclass, field
from typing import Any, Final

import httpx
import msgspec
import openai
import pytest

from shared.events import NodeReady, OutputChunk
from tests.e2e import clients, deploy
from tests.e2e.deploy import Running
from tests.models.moonshine import oracle
from tests.models.whisper.served import Samples, wav
from tests.tiny.moonshine import tiny_moonshine
from tests.tiny.whisper import RATE, sound

pytestmark = pytest.mark.timeout(200)

SOUNDS: Final[dict[str, Samples]] = {
    "short": sound(1.6, 1),
    "longer": sound(5.3, 2),
    "windows": sound(14.0, 3),
    "killed": sound(40.0, 4),
}
SHORT: Final = wav(SOUNDS["short"])
WORDS: Final = {"response_format": "verbose_json", "timestamp_granularities[]": "word"}
REFUSED: Final[dict[str, tuple[str, dict[str, Any], bytes, str]]] = {
    "translation": ("translations", {}, SHORT, "not_supported"),
    "words": ("transcriptions", WORDS, SHORT, "invalid_value"),
    "language": ("transcriptions", {"language": "de"}, SHORT, "not_supported"),
    "prompt": ("transcriptions", {"prompt": "names"}, SHORT, "not_supported"),
    "cut off": ("transcriptions", {}, wav(SOUNDS["longer"])[:60_000], "invalid_media"),
    "too short": ("transcriptions", {}, wav(sound(0.05)), "invalid_media"),
    "no windows": ("transcriptions", {"tokens_per_second": "30"}, SHORT, "invalid_request"),
}
"""Route, fields, file, and the expected code."""


@dataclass(slots=True)
class Found:
    """The results of the deployment.

    Attributes:
        answers: `verbose_json` by the name of the sound.
        forms: the file `windows` in other formats, and streamed by OpenAI's client: the text.
        refused: status and error, by the case.
        attempts: of the request whose worker was killed, the attempts of each walk of a window.
        verdicts, executed: of `dalsegno replay`.
    """

    answers: dict[str, dict[str, Any]] = field(default_factory=dict)
    forms: dict[str, str] = field(default_factory=dict)
    refused: dict[str, tuple[int, dict[str, Any]]] = field(default_factory=dict)
    attempts: list[int] = field(default_factory=list)
    verdicts: dict[str, dict[str, Any]] = field(default_factory=dict)
    executed: str = ""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("moonshine")
    with deploy.serve(folder, model=str(tiny_moonshine())) as running:
        result = asyncio.run(ask(running))
        result.verdicts = clients.verdicts(clients.run_on(running, "replay", "--all", "--json"))
        executed = clients.run_on(
            running, "replay", "windows", "--execute", "--config", str(tiny_moonshine())
        )
        result.executed = executed.stdout + executed.stderr
    return result


async def ask(running: Running) -> Found:
    found = Found()
    async with clients.http(running) as http, clients.reader(running) as reader:
        async with asyncio.TaskGroup() as tasks:
            for name in ("short", "longer", "windows"):
                tasks.create_task(keep(http, found, name))
        for form in ("json", "text", "srt", "vtt"):
            answer = await post(http, "transcriptions", wav(SOUNDS["windows"]), response_format=form)
            found.forms[form] = answer.text
        found.forms["streamed"] = await streamed(running)
        url = "data:audio/wav;base64," + base64.b64encode(wav(SOUNDS["windows"])).decode()
        body = {"files": [{"url": url}], "output_modalities": ["text", "transcript"]}
        found.forms["generate"] = (await http.post("/generate", json=body)).text
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(keep(http, found, "killed"))
            await reader.until(reader.subjects.outputs_of("killed"), OutputChunk)
            pid = running.pids.worker["0"]
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
        events = await reader.events("killed")
        found.attempts = [one.attempt for one in events if isinstance(one, NodeReady)]
        for name, (route, fields, file, _) in REFUSED.items():
            answer = await post(http, route, file, **fields)
            found.refused[name] = answer.status_code, answer.json()["error"]
    return found


async def keep(http: httpx.AsyncClient, found: Found, name: str) -> None:
    answer = await post(
        http, "transcriptions", wav(SOUNDS[name]), response_format="verbose_json", request_id=name
    )
    assert answer.status_code == 200, answer.text
    found.answers[name] = answer.json()


async def post(http: httpx.AsyncClient, route: str, file: bytes, **fields: Any) -> httpx.Response:
    form = {"model": tiny_moonshine().name, **fields}
    return await http.post(f"/v1/audio/{route}", data=form, files={"file": ("speech.wav", file, "audio/wav")})


async def streamed(running: Running) -> str:
    async with openai.AsyncOpenAI(api_key="none", base_url=f"{running.url}/v1", max_retries=0) as sdk:
        events = await sdk.audio.transcriptions.create(
            model=tiny_moonshine().name, file=("speech.wav", wav(SOUNDS["windows"])), stream=True
        )
        pieces = [event.delta async for event in events if event.type == "transcript.text.delta"]
    assert len(pieces) > 1
    return "".join(pieces)


@pytest.mark.parametrize("name", SOUNDS)
def test_transcripts_are_those_of_generate(found: Found, name: str) -> None:
    segments = found.answers[name]["segments"]
    assert segments[0]["start"] == 0
    assert segments[-1]["end"] == pytest.approx(len(SOUNDS[name]) / RATE, abs=0.01)
    for one in segments:
        first, stop = round(one["start"] * RATE), min(round(one["end"] * RATE), len(SOUNDS[name]))
        assert one["tokens"] == oracle.generate(SOUNDS[name][first:stop])
    assert (len(segments) > 1) is (name in ("windows", "killed"))


def test_all_forms_have_the_text(found: Found) -> None:
    text, segments = found.answers["windows"]["text"], found.answers["windows"]["segments"]
    assert found.forms["text"].strip() == text
    assert found.forms["streamed"].strip() == text
    assert msgspec.json.decode(found.forms["json"])["text"] == text
    chunks = [msgspec.json.decode(line) for line in found.forms["generate"].splitlines()]
    pieces = [base64.b64decode(one["data"]).decode() for one in chunks if one["modality"] == "text"]
    assert "".join(pieces) == text
    for form in ("srt", "vtt"):
        assert found.forms[form].count("-->") == len(segments)


def test_a_killed_request_goes_on_with_its_window(found: Found) -> None:
    windows = len(found.answers["killed"]["segments"])
    assert {*found.attempts} == {1, 2}
    assert found.attempts.count(1) > 1
    assert len(found.attempts) < 2 * windows, "no window before the crash is ordered again"


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_by_name(found: Found, name: str) -> None:
    status, error = found.refused[name]
    assert 400 <= status < 500
    assert error["code"] == REFUSED[name][-1], error


def test_every_request_replays(found: Found) -> None:
    assert {*SOUNDS} <= found.verdicts.keys()
    assert all(one["matches"] for one in found.verdicts.values()), found.verdicts
    assert "agree" in found.executed, found.executed
