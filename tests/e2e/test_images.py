"""Chats with images over the real command line: LLaVA with its tower on a rank of its own.

The answers are those of transformers' `generate` on the same checkpoint.
"""

import asyncio
import base64
import io
import json
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from PIL import Image

from shared.events import AnyEvent, OutputChunk, RequestFinished, RequestSubmitted, WalkCompleted
from tests.e2e import clients
from tests.e2e.deploy import Running, serve
from tests.models.vision_language.oracle import Picture, loaded, picture, user
from tests.tiny.vision import tiny_vision_checkpoint

pytestmark = pytest.mark.timeout(200)
TOKENS: Final = 40
PICTURES: Final = [picture(0, 40, 60), picture(1, 90, 30), picture(2, 33, 33)]
CHATS: Final[dict[str, tuple[dict[str, Any], list[Picture]]]] = {
    "text": (user("Hello there."), []),
    "image": (user(0, "What is it?"), PICTURES[:1]),
    "images": (user("First", 0, " second", 1, "\nwhich?"), PICTURES[:2]),
    "another": (user(0, "What is it?"), PICTURES[2:]),
    "last": (user("What is it?", 0), PICTURES[1:2]),
}
RANKS: Final = ("0", "1")
KILLED: Final = ("images", "last")


def png(one: Picture) -> bytes:
    file = io.BytesIO()
    Image.fromarray(one).save(file, "PNG")
    return file.getvalue()


def openai(message: dict[str, Any], pictures: list[Picture]) -> list[dict[str, Any]]:
    """The message as OpenAI's API has it, with the images as data URLs."""
    parts = []
    for part in message["content"]:
        if part["type"] == "image":
            url = "data:image/png;base64," + base64.b64encode(png(pictures[part["file"]])).decode()
            part = {"type": "image_url", "image_url": {"url": url}}  # noqa: PLW2901
        parts.append(part)
    return [{"role": "user", "content": parts}]


@dataclass(slots=True)
class Said:
    """The results of one deployment.

    Attributes:
        answers: by chat, the completion.
        killed: by chat, the completion in whose middle both ranks were killed.
        logs: by request, its records.
        verdicts: of `dalsegno replay`, by request.
        executed: the output of `dalsegno replay --execute`.
        prefix, rows: the lookups in the prefix cache and in the cache of rows, as the ranks report them.
    """

    answers: dict[str, dict[str, Any]] = field(default_factory=dict)
    killed: dict[str, dict[str, Any]] = field(default_factory=dict)
    logs: dict[str, list[AnyEvent]] = field(default_factory=dict)
    refused: dict[str, dict[str, Any]] = field(default_factory=dict)
    verdicts: dict[str, dict[str, Any]] = field(default_factory=dict)
    executed: str = ""
    prefix: dict[str, Any] = field(default_factory=dict)
    rows: dict[str, Any] = field(default_factory=dict)


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Said:
    folder = tmp_path_factory.mktemp("images")
    config = str(two_ranks(folder))
    with serve(folder, model=config) as running:
        found = asyncio.run(ask(running))
        found.verdicts = clients.verdicts(clients.run_on(running, "replay", "--all", "--json"))
        ended = clients.run_on(running, "replay", "images", "--execute", "--config", config)
        found.executed = ended.stdout + ended.stderr
    return found


def two_ranks(folder: Path) -> Path:
    """A configuration with the tower on a rank of its own."""
    path = folder / "llava.yaml"
    path.write_text(
        f"model: llava\ncheckpoint: {tiny_vision_checkpoint('llava')}\nmax_seq_len: 2048\n"
        "node_groups:\n  - node_names: [prepare, llm]\n    ranks: [0]\n"
        "  - node_names: [vision_encoder]\n    ranks: [1]\n"
    )
    return path


async def ask(running: Running) -> Said:
    said = Said()
    async with clients.http(running) as http, clients.reader(running) as reader:
        model = (await http.get("/v1/models")).json()["data"][0]["id"]

        async def complete(name: str, chat: str, **more: Any) -> httpx.Response:
            body = {"model": model, "messages": openai(*CHATS[chat]), "request_id": name}
            body |= {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
            return await http.post("/v1/chat/completions", json=body | more)

        async with asyncio.TaskGroup() as tasks:
            asked = {name: tasks.create_task(complete(name, name)) for name in CHATS}
        said.answers = {name: task.result().json() for name, task in asked.items()}
        said.answers["again"] = (await complete("again", "images")).json()
        said.refused = await refusals(http, model)
        prefix = reader.subjects.heartbeat("worker", "0"), reader.subjects.heartbeat("worker", "1")
        beat = await reader.said(prefix[0], lambda beat: beat["meters"]["prefix"]["hit"] > 0)
        said.prefix = beat["meters"]["prefix"]
        beat = await reader.said(prefix[1], lambda beat: beat["meters"]["encoders"]["hits"] > 0)
        said.rows = beat["meters"]["encoders"]
        async with asyncio.TaskGroup() as tasks:
            killed = {
                name: tasks.create_task(complete(f"killed-{name}", name, max_tokens=300)) for name in KILLED
            }
            for name in KILLED:
                await reader.until(reader.subjects.outputs_of(f"killed-{name}"), OutputChunk)
            for rank in RANKS:
                os.kill(running.pids.worker[rank], signal.SIGKILL)
        said.killed = {name: task.result().json() for name, task in killed.items()}
        for name in (*CHATS, "again"):
            await reader.until(reader.subjects.walk(name), RequestFinished)
            said.logs[name] = await reader.events(name)
    return said


async def refusals(http: httpx.AsyncClient, model: str) -> dict[str, dict[str, Any]]:
    """The errors of requests that cannot be served."""
    [message] = openai(*CHATS["image"])
    image, text = message["content"]
    url = image["image_url"]["url"]
    contents = {
        "placeholder": [image, {"type": "text", "text": "What is <image>?"}],
        "damaged": [{"type": "image_url", "image_url": {"url": url[: len(url) // 2 // 4 * 4]}}, text],
        "narrow": [{"type": "image_url", "image_url": {"url": data_url(picture(5, 1, 20_000))}}, text],
    }
    found = {}
    for name, content in contents.items():
        body = {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": 4}
        answer = await http.post("/v1/chat/completions", json=body)
        found[name] = {"status": answer.status_code} | answer.json()
    return found


def data_url(one: Picture) -> str:
    return "data:image/png;base64," + base64.b64encode(png(one)).decode()


def expected(chat: str, tokens: int = TOKENS) -> list[int]:
    message, pictures = CHATS[chat]
    vlm = loaded("llava")
    return vlm.generated(vlm.reference([message], pictures), tokens)


def text_of(chat: str, tokens: int = TOKENS) -> str:
    decoder = loaded("llava").processing.text_decoder()
    return "".join(decoder.push(token) for token in expected(chat, tokens)) + decoder.flush()


@pytest.mark.parametrize("chat", CHATS)
def test_answers_of_two_ranks_are_those_of_generate(said: Said, chat: str) -> None:
    answer = said.answers[chat]

    assert answer["choices"][0]["message"]["content"] == text_of(chat)
    message, pictures = CHATS[chat]
    prompt = loaded("llava").reference([message], pictures).ids
    assert answer["usage"]["prompt_tokens"] == len(prompt)


def test_answers_depend_on_the_image(said: Said) -> None:
    """Negative control: the same question, and as many tokens, about another image."""
    first, other = (said.answers[name] for name in ("image", "another"))

    assert first["usage"]["total_tokens"] == other["usage"]["total_tokens"]
    assert first["choices"][0]["message"]["content"] != other["choices"][0]["message"]["content"]


def test_the_same_chat_again_finds_its_images_in_both_caches(said: Said) -> None:
    again, first = said.answers["again"], said.answers["images"]
    assert again["usage"]["total_tokens"] == first["usage"]["total_tokens"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32
    assert again["choices"][0]["message"] == first["choices"][0]["message"]
    assert said.rows["hits"] >= 2
    assert said.prefix["hit"] >= 32


@pytest.mark.parametrize("chat", KILLED)
def test_killed_ranks_change_no_answer(said: Said, chat: str) -> None:
    answer = said.killed[chat]

    assert answer["choices"][0]["message"]["content"] == text_of(chat, 300)


def test_events_carry_no_bytes_of_media(said: Said) -> None:
    submitted = next(event for event in said.logs["images"] if isinstance(event, RequestSubmitted))

    assert [medium.modality for medium in submitted.inputs.files] == ["image", "image"]
    assert all(medium.data is None and len(medium.digest) == 64 for medium in submitted.inputs.files)
    for event in said.logs["images"]:
        if isinstance(event, WalkCompleted):
            inline = [
                handle.data
                for result in event.results
                for name, handle in result.outputs.items()
                if name != "token_ids"
            ]
            assert not any(inline)


def test_a_text_touches_no_tower(said: Said) -> None:
    walks = [
        result.name
        for event in said.logs["text"]
        if isinstance(event, WalkCompleted)
        for result in event.results
    ]

    assert walks == ["prepare", "prefill", "decode"]


@pytest.mark.parametrize(
    ("name", "code"),
    [("placeholder", "media_mismatch"), ("damaged", "invalid_media"), ("narrow", "invalid_media")],
)
def test_what_cannot_be_read_is_a_typed_error(said: Said, name: str, code: str) -> None:
    refused = said.refused[name]

    assert refused["status"] in (400, 422)
    assert refused["error"]["code"] == code
    assert "Traceback" not in json.dumps(refused)


def test_every_request_replays(said: Said) -> None:
    assert {*CHATS, "again", *(f"killed-{name}" for name in KILLED)} <= said.verdicts.keys()
    assert all(verdict["matches"] for verdict in said.verdicts.values()), said.verdicts


def test_a_data_replay_is_exact(said: Said) -> None:
    assert "agree exactly" in said.executed
