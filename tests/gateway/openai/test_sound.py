"""Chats that are answered with sound, by OpenAI's client, and earlier sound in later chats."""

import asyncio
import base64
import io
import json
import wave
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Final

import av
import httpx
import openai
import pytest

from configs.secrets import ApiKey
from shared.events import RequestSubmitted
from tests.gateway.world import SERVED, Performance, World, deployment, listening

CHATS: Final = "/v1/chat/completions"
SPEAKER: Final = replace(
    SERVED,
    modalities=("text", "audio"),
    outputs=("text", "audio"),
    media={"audio": {"sample_rate": 24_000, "num_channels": 1}},
    voices=("ethan", "chelsie"),
)
PIECES: Final = [bytes([number]) * 4096 for number in range(1, 4)]
ASKED: Final[dict[str, Any]] = {
    "model": "demo",
    "messages": [{"role": "user", "content": "Hello."}],
    "modalities": ["text", "audio"],
    "audio": {"format": "wav", "voice": "chelsie"},
}
STREAMED: Final = ASKED | {"stream": True, "audio": {"format": "pcm16", "voice": "ethan"}}


async def talk(performance: Performance) -> None:
    """Write and speak, on two tracks; a later turn repeats what the model was told of the earlier one."""
    messages = performance.event.inputs.messages or []
    words = ["Good", " morning."] if len(messages) == 1 else [str(messages[1]["content"])]
    for number, word in enumerate(words):
        performance.say(word)
        if "audio" in performance.event.inputs.output_modalities:
            performance.sound(PIECES[number], track="Code2Wav")
        await asyncio.sleep(0)
    if "audio" in performance.event.inputs.output_modalities:
        performance.sound(PIECES[2], track="Code2Wav")
    performance.finish()


def submitted(world: World) -> list[RequestSubmitted]:
    return [event for event in world.events("request") if isinstance(event, RequestSubmitted)]


async def post(body: dict[str, Any], **how: Any) -> tuple[httpx.Response, list[RequestSubmitted]]:
    async with deployment(talk, served=how.pop("served", SPEAKER), **how) as world:
        return await world.client.post(CHATS, json=body), submitted(world)


@asynccontextmanager
async def talking() -> AsyncIterator[tuple[World, openai.AsyncOpenAI]]:
    async with (
        deployment(talk, served=SPEAKER) as world,
        listening(world) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield world, client


async def test_a_message_has_sound_and_its_transcript() -> None:
    response, [event] = await post(ASKED | {"request_id": "mine"})
    [choice] = response.json()["choices"]
    message = choice["message"]
    assert message["content"] is None
    assert message["audio"]["id"] == "audio-mine"
    assert message["audio"]["transcript"] == "Good morning."
    assert message["audio"]["expires_at"] > response.json()["created"]
    with wave.open(io.BytesIO(base64.b64decode(message["audio"]["data"]))) as file:
        assert file.getframerate() == 24_000
        assert file.readframes(file.getnframes()) == b"".join(PIECES)
    assert event.params.voice == "chelsie"
    assert event.inputs.output_modalities == ["text", "audio"]


@pytest.mark.parametrize("form", ["mp3", "flac", "opus", "aac", "pcm16"])
async def test_every_format_can_be_played(form: str) -> None:
    response, _ = await post(ASKED | {"audio": {"format": form, "voice": {"id": "ethan"}}})
    data = base64.b64decode(response.json()["choices"][0]["message"]["audio"]["data"])
    if form == "pcm16":
        assert data == b"".join(PIECES)
        return
    with av.open(io.BytesIO(data), "r") as file:
        assert any(frame.samples for frame in file.decode(audio=0))


async def test_several_answers_have_sounds_of_their_own() -> None:
    response, _ = await post(ASKED | {"n": 2, "request_id": "two"})
    sounds = [choice["message"]["audio"] for choice in response.json()["choices"]]
    assert [one["transcript"] for one in sounds] == ["Good morning."] * 2
    assert sounds[0]["id"] != sounds[1]["id"]


async def test_a_chat_without_the_modality_has_text_alone() -> None:
    body = {name: value for name, value in ASKED.items() if name not in ("modalities", "audio")}
    response, [event] = await post(body)
    assert response.json()["choices"][0]["message"] == {
        "role": "assistant", "content": "Good morning.", "refusal": None,
    }  # fmt: skip
    assert event.params.voice is None


@pytest.mark.processes
async def test_openais_client_reads_a_stream_and_goes_on_with_its_id() -> None:
    async with talking() as (world, client):
        stream = await client.chat.completions.create(**STREAMED)
        deltas = [chunk.choices[0].delta.to_dict() async for chunk in stream if chunk.choices]
        sounds: list[dict[str, Any]] = [one["audio"] for one in deltas if "audio" in one]
        messages = [
            *ASKED["messages"],
            {"role": "assistant", "audio": {"id": sounds[0]["id"]}},
            {"role": "user", "content": "What did you say?"},
        ]
        later = await client.chat.completions.create(**ASKED | {"messages": messages})
        events = submitted(world)
    assert "".join(one.get("transcript", "") for one in sounds) == "Good morning."
    assert b"".join(base64.b64decode(one.get("data", "")) for one in sounds) == b"".join(PIECES)
    assert sounds[-1].keys() == {"id", "expires_at"}
    assert {one["id"] for one in sounds} == {f"audio-{events[0].request_id}"}
    assert later.choices[0].message.audio is not None
    assert later.choices[0].message.audio.transcript == "Good morning."
    assert (events[1].inputs.messages or [])[1] == {"role": "assistant", "content": "Good morning."}


async def test_a_stream_goes_on_after_its_last_event() -> None:
    body = STREAMED | {"request_id": "mine"}
    async with deployment(talk, served=SPEAKER) as world:
        whole = (await world.client.post(CHATS, json=body)).text
        events = whole.split("\n\n")
        position = events[3].splitlines()[0].removeprefix("id: ")
        rest = await world.client.post(CHATS, json=body, headers={"last-event-id": position})
    assert "audio" in events[3]
    assert whole == "\n\n".join([*events[:4], rest.text])


@pytest.mark.parametrize(
    ("changed", "param"),
    [
        ({"audio": None}, "audio"),
        ({"modalities": ["text"]}, "audio"),
        ({"audio": {"format": "midi", "voice": "ethan"}}, "audio.format"),
        ({"audio": {"format": "wav", "voice": "alloy"}}, "audio.voice"),
        ({"audio": {"format": "wav", "voice": {"name": "ethan"}}}, "audio.voice"),
        ({"audio": {"format": "wav", "speed": 2}}, "audio.speed"),
        ({"stream": True}, "audio.format"),
        ({"modalities": ["text", "image"]}, "modalities"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ],
)
async def test_what_cannot_be_done_is_refused_before_anything_is_computed(
    changed: dict[str, Any], param: str
) -> None:
    body = {name: value for name, value in (ASKED | changed).items() if value is not None}
    response, events = await post(body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert events == []


@pytest.mark.parametrize(
    ("role", "sound", "status", "code"),
    [
        ("assistant", {"id": "audio-nobody"}, 404, "audio_not_found"),
        ("assistant", {"id": "nobody"}, 400, "invalid_value"),
        ("assistant", {"id": 7}, 400, "invalid_value"),
        ("assistant", "audio-nobody", 400, "invalid_value"),
        ("assistant", {"id": "audio-a b"}, 404, "audio_not_found"),
        ("assistant", {"id": "audio-written"}, 404, "audio_not_found"),
        ("user", {"id": "audio-spoken"}, 400, "invalid_value"),
    ],
)
async def test_sound_that_is_not_there_is_named(role: str, sound: Any, status: int, code: str) -> None:
    question = {"role": "user", "content": "Hello."}
    async with deployment(talk, served=SPEAKER) as world:
        for name, body in (("spoken", ASKED), ("written", ASKED | {"modalities": ["text"], "audio": None})):
            asked = {key: value for key, value in body.items() if value is not None}
            assert (await world.client.post(CHATS, json=asked | {"request_id": name})).status_code == 200
        messages = [question, {"role": role, "content": None, "audio": sound}, question]
        response = await world.client.post(CHATS, json=ASKED | {"messages": messages})
        assert len(submitted(world)) == 2
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (status, code)
    assert error["param"].startswith("messages[1].audio")


async def test_a_message_that_has_its_transcript_needs_no_log() -> None:
    said = {"role": "assistant", "content": "Good morning.", "audio": {"id": "audio-gone"}}
    response, [event] = await post(ASKED | {"messages": [*ASKED["messages"], said, *ASKED["messages"]]})
    assert response.status_code == 200
    assert (event.inputs.messages or [])[1] == {"role": "assistant", "content": "Good morning."}


async def test_the_sound_of_another_key_does_not_exist() -> None:
    keys = [ApiKey(name="anna", secret="a" * 32), ApiKey(name="ben", secret="b" * 32)]
    messages = [
        *ASKED["messages"],
        {"role": "assistant", "audio": {"id": "audio-secret"}},
        *ASKED["messages"],
    ]
    async with deployment(talk, served=SPEAKER, keys=keys) as world:
        anna, ben = ({"authorization": f"Bearer {one.secret}"} for one in keys)
        await world.client.post(CHATS, json=ASKED | {"request_id": "secret"}, headers=anna)
        own = await world.client.post(CHATS, json=ASKED | {"messages": messages}, headers=anna)
        foreign = await world.client.post(CHATS, json=ASKED | {"messages": messages}, headers=ben)
    assert own.status_code == 200
    assert (foreign.status_code, foreign.json()["error"]["code"]) == (404, "audio_not_found")
    assert "Good morning" not in json.dumps(foreign.json())
