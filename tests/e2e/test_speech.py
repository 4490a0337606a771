"""Orpheus over the real command line: three layouts, the same audio, streamed while the model generates."""

import asyncio
import base64
import json
import os
import signal
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

import httpx
import pytest

from shared.events import AnyEvent, NodeReady, OutputChunk, OutputFence, RequestFinished, WalkCompleted
from tests.e2e import clients
from tests.e2e.deploy import Running, serve
from tests.models.orpheus.oracle import generate, prompt, speech
from tests.tiny.orpheus import tiny_orpheus

pytestmark = pytest.mark.timeout(300)  # whatever a layout is asked, its first test waits for
LAYOUTS: Final = {
    "orpheus": {"prefill": 0, "decode": 0, "snac_chunk": 0},
    "orpheus_three_ranks": {"prefill": 0, "decode": 1, "snac_chunk": 2},
}
"""Bundled placements, and the rank of each walk's node. `tests.workers.test_speech_over_ranks` has all."""
LARGEST: Final = "orpheus_three_ranks"

GREEDY: Final[dict[str, Any]] = {"temperature": 0, "repetition_penalty": 1.0}
ASKED: Final[dict[str, dict[str, Any]]] = {
    "to-its-end": {"input": "hello there", "voice": "tara", "seed": 3, **GREEDY},
    "shorter-than-a-window": {"input": "x", "voice": "mia", "seed": 4, **GREEDY},
    "to-its-limit": {"input": "one two three", "voice": "leo", "seed": 5, "max_tokens": 90, **GREEDY},
    "as-published": {"input": "good morning", "seed": -6, "max_tokens": 120},
    "without-an-end": {"input": "what?", "voice": "zoe", "seed": 7, "max_tokens": 300, "ignore_eos": True},
}
"""Asked all at the same time, so that rows and windows of many are computed together."""
WITH_AN_ORACLE: Final = [name for name, asked in ASKED.items() if asked.get("temperature") == 0]


@dataclass(slots=True)
class Heard:
    """The results of one layout.

    Attributes:
        sounds: by request, 16-bit samples.
        logs: by request, its records in order.
        generated: the answer of `/generate`, line by line.
        bereft: the audio of `without-an-end` when SNAC's worker was killed in its middle.
        halved: for each of `TOGETHER`, the audio when the two workers of the language model were killed in
            its
            middle, and its records.
        broken: by form, the data received when the gateway was killed in its middle, the continuation from
            its
            successor, and the successor's whole answer.
        replayed: the verdicts of `dalsegno replay`, by request.
    """

    sounds: dict[str, bytes] = field(default_factory=dict)
    logs: dict[str, list[AnyEvent]] = field(default_factory=dict)
    generated: list[dict[str, Any]] = field(default_factory=list)
    bereft: bytes = b""
    halved: dict[str, tuple[bytes, list[AnyEvent]]] = field(default_factory=dict)
    broken: dict[str, tuple[bytes, bytes, bytes]] = field(default_factory=dict)
    replayed: dict[str, dict[str, Any]] = field(default_factory=dict)


class Deployments:
    """Layouts, each served when it is first needed, one at a time."""

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        self._folders = folders
        self._heard: dict[str, Heard] = {}

    def heard(self, layout: str) -> Heard:
        if layout not in self._heard:
            folder = self._folders.mktemp(layout)
            with serve(folder, "--checkpoint", str(tiny_orpheus()), model=layout) as running:
                found = asyncio.run(ask(running))
                found.replayed = clients.verdicts(clients.run_on(running, "replay", "--all", "--json"))
            self._heard[layout] = found
        return self._heard[layout]


@pytest.fixture(scope="module")
def deployments(tmp_path_factory: pytest.TempPathFactory) -> Deployments:
    return Deployments(tmp_path_factory)


async def ask(running: Running) -> Heard:
    heard = Heard()
    async with clients.http(running) as http, clients.reader(running) as reader:
        model = (await http.get("/v1/models")).json()["data"][0]["id"]

        async def say(name: str, asked: dict[str, Any]) -> bytes:
            body = {"model": model, "response_format": "pcm", "request_id": name, **asked}
            answer = await http.post("/v1/audio/speech", json=body)
            assert answer.status_code == 200, answer.text
            return answer.content

        async with asyncio.TaskGroup() as tasks:
            saying = {name: tasks.create_task(say(name, asked)) for name, asked in ASKED.items()}
        heard.sounds = {name: task.result() for name, task in saying.items()}
        for name in ASKED:
            await reader.until(reader.subjects.walk(name), RequestFinished)
            heard.logs[name] = await reader.events(name)
        heard.generated = await say_over_generate(http)
        if model == LARGEST:
            async with asyncio.TaskGroup() as tasks:
                bereft = tasks.create_task(say("bereft", ASKED["without-an-end"]))
                await reader.until(reader.subjects.outputs_of("bereft"), OutputChunk)
                os.kill(running.pids.worker[str(LAYOUTS[LARGEST]["snac_chunk"])], signal.SIGKILL)
            heard.bereft = bereft.result()
            await clients.wait_until_ready(running)
            heard.halved = await halve(running, reader, say)
        if model == "orpheus":
            heard.broken = await break_off(running, http)
    return heard


TOGETHER: Final = ("without-an-end", "as-published")
LANGUAGE_MODEL: Final = ("prefill", "decode")


async def halve(
    running: Running,
    reader: clients.Reader,
    say: Callable[[str, dict[str, Any]], Coroutine[None, None, bytes]],
) -> dict[str, tuple[bytes, list[AnyEvent]]]:
    """Kill the workers of prefill and decode at once, in the middle of several speeches."""
    async with asyncio.TaskGroup() as tasks:
        saying = {name: tasks.create_task(say(f"halved-{name}", ASKED[name])) for name in TOGETHER}
        for name in TOGETHER:
            await reader.until(reader.subjects.outputs_of(f"halved-{name}"), OutputChunk)
        for walk in LANGUAGE_MODEL:
            os.kill(running.pids.worker[str(LAYOUTS[LARGEST][walk])], signal.SIGKILL)
    return {name: (task.result(), await reader.events(f"halved-{name}")) for name, task in saying.items()}


FORMS: Final[dict[str, dict[str, Any]]] = {
    "pcm": {"response_format": "pcm"},
    "mp3": {"response_format": "mp3"},
    "opus": {"response_format": "opus"},
    "events": {"response_format": "pcm", "stream_format": "sse"},
}


async def break_off(running: Running, http: httpx.AsyncClient) -> dict[str, tuple[bytes, bytes, bytes]]:
    """Kill the gateway in the middle of an answer of each form, and resume at its successor."""
    had = dict.fromkeys(FORMS, b"")
    begun = {name: asyncio.Event() for name in FORMS}

    def body(name: str) -> dict[str, Any]:
        return {"model": "orpheus", "request_id": f"broken-{name}", **ASKED["without-an-end"], **FORMS[name]}

    async def hear(name: str) -> None:
        with suppress(httpx.HTTPError):
            async with http.stream("POST", "/v1/audio/speech", json=body(name)) as response:
                async for piece in response.aiter_raw():
                    had[name] += piece
                    begun[name].set()

    async with asyncio.TaskGroup() as tasks:
        for name in FORMS:
            tasks.create_task(hear(name))
        for name in FORMS:
            await begun[name].wait()
        os.kill(running.pids.gateway[0], signal.SIGKILL)
    await clients.wait_until_ready(running)
    had["events"] = had["events"][: had["events"].rindex(b"\n\n") + 2]

    found = {}
    for name in FORMS:
        after = str(len(had[name]))
        if name == "events":
            after = had[name].rpartition(b"id: ")[2].partition(b"\n")[0].decode()
        rest = await http.post("/v1/audio/speech", params={"after": after}, json=body(name))
        whole = await http.post("/v1/audio/speech", json=body(name))
        found[name] = had[name], rest.content, whole.content
    return found


async def say_over_generate(http: httpx.AsyncClient) -> list[dict[str, Any]]:
    asked = {name: value for name, value in ASKED["to-its-end"].items() if name != "input"}
    body = {
        "text": ASKED["to-its-end"]["input"],
        "output_modalities": ["audio"],
        "model_kwargs": asked,
    }
    answer = await http.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


@cache
def expected(name: str) -> tuple[list[int], bytes]:
    """The greedy answer to the request of that name, and its audio."""
    asked = ASKED[name]
    answer, margin = generate(prompt(asked["voice"], asked["input"]), asked.get("max_tokens", 1200))
    assert margin > 1e-4  # else equality would be luck
    return answer, speech(answer, asked["seed"])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", WITH_AN_ORACLE)
def test_what_is_heard_is_what_generate_says_and_the_package_makes_of_it(
    deployments: Deployments, layout: str, name: str
) -> None:
    heard, (answer, sound) = deployments.heard(layout), expected(name)

    assert heard.sounds[name] == sound
    [finished] = [event for event in heard.logs[name] if isinstance(event, RequestFinished)]
    assert finished.usage.completion_tokens == len(answer)


@pytest.mark.parametrize("name", ASKED)
def test_every_layout_sounds_the_same(deployments: Deployments, name: str) -> None:
    one, *others = [deployments.heard(layout).sounds[name] for layout in LAYOUTS]

    assert one
    assert len(one) % 4096 == 0  # whole frames
    assert all(other == one for other in others)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sound_leaves_before_the_language_model_has_finished(deployments: Deployments, layout: str) -> None:
    log = deployments.heard(layout).logs["without-an-end"]
    sounding = [place for place, event in enumerate(log) if isinstance(event, OutputChunk) and event.data]
    [said] = [
        place
        for place, event in enumerate(log)
        if isinstance(event, WalkCompleted) and "completion_tokens" in _facts(event)
    ]

    assert sounding[0] < said
    assert sum(place < said for place in sounding) > len(sounding) / 4


def _facts(event: WalkCompleted) -> dict[str, Any]:
    return {name: value for result in event.results for name, value in result.facts.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_walk_runs_where_the_file_says(deployments: Deployments, layout: str) -> None:
    orders = [event for event in deployments.heard(layout).logs["to-its-end"] if isinstance(event, NodeReady)]

    hosts = {
        walk.name: order.walk_placement.get(walk.name, {}).get(node, order.placement[node])
        for order in orders
        for walk in order.walks
        for node in ("LLM" if walk.name in ("prefill", "decode") else "snac_decoder",)
        if walk.name in LAYOUTS[layout]
    }
    assert hosts == LAYOUTS[layout]
    assert {order.rank for order in orders} == {0, *LAYOUTS[layout].values()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_over_generate_it_is_the_same_sound(deployments: Deployments, layout: str) -> None:
    *chunks, end = deployments.heard(layout).generated

    assert {chunk["modality"] for chunk in chunks} == {"audio"}
    assert all(chunk["metadata"]["sample_rate"] == 24000 for chunk in chunks)
    sound = b"".join(base64.b64decode(chunk["data"]) for chunk in chunks)
    assert sound == deployments.heard(layout).sounds["to-its-end"]
    assert end["metadata"]["finish_reason"] == "stop"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_was_said_replays(deployments: Deployments, layout: str) -> None:
    found = deployments.heard(layout).replayed

    assert [name for name in ASKED if not found[name]["matches"]] == []
    assert {found[name]["phase"] for name in ASKED} == {"finished"}


@pytest.mark.parametrize("form", FORMS)
def test_a_sound_goes_on_to_the_byte_when_its_gateway_is_killed(deployments: Deployments, form: str) -> None:
    had, rest, whole = deployments.heard("orpheus").broken[form]

    assert had
    assert len(had) < len(whole), "the kill came too late to disturb anybody"
    assert had + rest == whole


def test_a_speech_goes_on_where_it_was_when_its_vocoder_is_killed(deployments: Deployments) -> None:
    heard = deployments.heard(LARGEST)

    assert heard.bereft == heard.sounds["without-an-end"]
    assert heard.replayed["bereft"]["matches"]


def test_speeches_go_on_where_they_were_when_their_language_model_is_killed(deployments: Deployments) -> None:
    heard = deployments.heard(LARGEST)
    logs = [log for _, log in heard.halved.values()]
    disturbed = [log for log in logs if any(isinstance(event, OutputFence) for event in log)]

    assert {name: sound for name, (sound, _) in heard.halved.items()} == {
        name: heard.sounds[name] for name in TOGETHER
    }
    assert disturbed, "the kill came too late to disturb anybody"
    for log in disturbed:
        fence = next(place for place, event in enumerate(log) if isinstance(event, OutputFence))
        before = [event for event in log[:fence] if isinstance(event, OutputChunk)]
        [finished] = [event for event in log if isinstance(event, RequestFinished)]
        assert 0 < len(before) <= finished.output.chunks  # what was heard of the first attempt stays
    assert all(heard.replayed[f"halved-{name}"]["matches"] for name in TOGETHER)
