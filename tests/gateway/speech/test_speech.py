import asyncio
import io
import json
import re
import wave
from base64 import b64decode
from dataclasses import replace
from typing import Annotated, Any, Literal

import av
import httpx
import msgspec
import openai
import pytest
from msgspec import Meta

from configs.deployment import GatewaySettings
from gateway.served_model import ServedModel
from shared.events import Failure, RequestSubmitted
from tests.gateway.world import SERVED, Performance, deployment, listening

SPEAKER: ServedModel = replace(
    SERVED,
    outputs=("audio",),
    media={"audio": {"sample_rate": 24_000, "num_channels": 1}},
    voices=("tara", "leo"),
)
ASKED = {"model": "demo", "input": "Hello there.", "voice": "tara"}
PIECES = [bytes([number]) * 4096 for number in range(1, 4)]


async def speak(performance: Performance) -> None:
    for piece in PIECES:
        performance.sound(piece)
        await asyncio.sleep(0)
    performance.finish()


async def asked(body: dict[str, Any], **options: Any) -> tuple[httpx.Response, list[RequestSubmitted]]:
    async with deployment(speak, served=SPEAKER, **options) as world:
        response = await world.client.post("/v1/audio/speech", json=ASKED | body)
        submitted = [event for event in world.events("request") if isinstance(event, RequestSubmitted)]
    return response, submitted


async def test_a_wav_is_whole_and_says_how_long_it_is() -> None:
    response, [event] = await asked({"response_format": "wav"})
    assert response.status_code == 200
    assert response.headers["content-type"] == "audio/wav"
    assert int(response.headers["content-length"]) == len(response.content)
    with wave.open(io.BytesIO(response.content)) as file:
        assert file.readframes(file.getnframes()) == b"".join(PIECES)
    assert event.inputs.text == "Hello there."
    assert event.inputs.output_modalities == ["audio"]
    assert event.params.voice == "tara"


async def test_pcm_is_the_samples_and_nothing_else() -> None:
    response, _ = await asked({"response_format": "pcm"})
    assert response.headers["content-type"] == "audio/pcm"
    assert response.content == b"".join(PIECES)


async def test_a_streamed_wav_begins_with_an_open_head() -> None:
    response, _ = await asked({"response_format": "wav", "stream": True})
    assert response.content[4:8] == b"\xff\xff\xff\xff"
    assert response.content[44:] == b"".join(PIECES)
    assert "content-length" not in response.headers


@pytest.mark.parametrize(
    ("name", "media_type"),
    [("mp3", "audio/mpeg"), ("opus", "audio/ogg"), ("flac", "audio/flac"), ("aac", "audio/aac")],
)
async def test_a_compressed_file_can_be_played(name: str, media_type: str) -> None:
    response, _ = await asked({"response_format": name})
    assert response.headers["content-type"] == media_type
    with av.open(io.BytesIO(response.content), "r") as file:
        assert any(frame.samples for frame in file.decode(audio=0))


async def test_mp3_is_what_comes_unasked() -> None:
    response, _ = await asked({})
    assert response.headers["content-type"] == "audio/mpeg"


@pytest.mark.processes
async def test_sound_is_sent_before_the_answer_is_complete() -> None:
    held = asyncio.Event()

    async def slowly(performance: Performance) -> None:
        performance.sound(PIECES[0])
        await held.wait()
        performance.sound(PIECES[1])
        performance.finish()

    async with (
        deployment(slowly, served=SPEAKER) as world,
        listening(world) as url,
        httpx.AsyncClient() as client,
        client.stream("POST", f"{url}/v1/audio/speech", json=ASKED | {"response_format": "pcm"}) as response,
    ):
        pieces = response.aiter_bytes()
        assert await anext(pieces) == PIECES[0]
        held.set()
        assert b"".join([piece async for piece in pieces]) == PIECES[1]


async def test_events_hold_the_file_and_then_the_usage() -> None:
    response, _ = await asked({"response_format": "pcm", "stream_format": "sse"})
    assert response.headers["content-type"].startswith("text/event-stream")
    told = [line for line in response.text.splitlines() if line.startswith("data: ")]
    events = [json.loads(line.removeprefix("data: ")) for line in told]
    heard = [b64decode(event["audio"]) for event in events if event["type"] == "speech.audio.delta"]
    assert heard == PIECES
    assert events[-1]["type"] == "speech.audio.done"
    assert events[-1]["usage"]["input_tokens"] == 7


@pytest.mark.parametrize("name", ["pcm", "wav", "mp3", "opus", "aac", "flac"])
async def test_a_file_goes_on_behind_the_bytes_its_client_has(name: str) -> None:
    body = ASKED | {"response_format": name, "stream": True, "request_id": "mine"}
    async with deployment(speak, served=SPEAKER) as world:
        whole = (await world.client.post("/v1/audio/speech", json=body)).content
        for had in (1, 43, len(whole) // 2, len(whole) - 1, len(whole)):
            rest = await world.client.post(f"/v1/audio/speech?after={had}", json=body)
            assert rest.status_code == 200
            assert whole[:had] + rest.content == whole

    assert len(world.performances) == 1


@pytest.mark.parametrize("name", ["pcm", "mp3"])
async def test_events_of_sound_go_on_to_the_byte_wherever_they_broke(name: str) -> None:
    body = ASKED | {"response_format": name, "stream_format": "sse", "request_id": "mine"}
    async with deployment(speak, served=SPEAKER) as world:
        whole = (await world.client.post("/v1/audio/speech", json=body)).content
        ends = [place + 2 for place in range(len(whole)) if whole.startswith(b"\n\n", place)]
        for end in ends:
            position = re.findall(rb"id: (.*)", whole[:end])[-1]
            rest = await world.client.post(
                "/v1/audio/speech", json=body, headers={b"last-event-id": position}
            )
            assert whole[:end] + rest.content == whole

    assert len(ends) > 2


@pytest.mark.parametrize(
    ("change", "after", "message"),
    [
        ({}, "x", "after: expected a number of bytes, found 'x'"),
        ({"response_format": "wav"}, "7", "after: expected none for an answer that is not streamed"),
        ({"request_id": None}, "7", "after: expected the request_id of the stream to resume"),
        ({"stream_format": "sse"}, "x", "after: expected the index of a chunk"),
    ],
)
async def test_a_place_to_go_on_from_that_is_none_is_refused(
    change: dict[str, Any], after: str, message: str
) -> None:
    async with deployment(speak, served=SPEAKER) as world:
        body = ASKED | {"request_id": "mine"} | change
        response = await world.client.post(f"/v1/audio/speech?after={after}", json=body)

    assert response.status_code == 400
    assert message in response.json()["error"]["message"]


@pytest.mark.processes
async def test_openais_own_client_hears_it() -> None:
    said: Any = {"model": "demo", "voice": "leo", "input": "Hi"}
    async with (
        deployment(speak, served=SPEAKER) as world,
        listening(world) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        speech = client.audio.speech
        whole = await speech.create(**said, response_format="wav")
        async with speech.with_streaming_response.create(**said, response_format="pcm") as streamed:
            pieces = [piece async for piece in streamed.iter_bytes()]
    assert whole.content[44:] == b"".join(pieces) == b"".join(PIECES)


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"voice": "alloy"}, "voice", "voice: expected one of tara, leo, found 'alloy'"),
        ({"voice": {"id": "alloy"}}, "voice", "voice: expected one of tara, leo, found 'alloy'"),
        ({"response_format": "midi"}, "response_format", "expected one of mp3, opus, aac, flac, wav, pcm"),
        ({"input": ""}, "input", "input: expected"),
        ({"input": None}, "input", "input: expected"),
        ({"input": " \n"}, "input", "input: expected a text with a word"),
        ({"input": "a" * 4097}, "input", "input: expected"),
        ({"speed": 2.0}, "speed", "speed: 2.0 is not supported yet"),
        ({"instructions": "whisper"}, "instructions", "instructions: 'whisper' is not supported yet"),
        ({"language": "German"}, "language", "language: 'German' is not supported yet"),
        ({"talker_top_k": 5}, "talker_top_k", "talker_top_k: no field of this route"),
        ({"stream_format": "sse", "stream": False}, "stream", "stream: expected true"),
        ({"temperature": -1}, "temperature", "temperature: expected"),
        ({"temprature": 1}, "temprature", "did you mean 'temperature'?"),
        ({"stop": "x"}, "stop", "stop: no field of this route"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens: expected"),
    ],
)
async def test_what_cannot_be_said_is_refused_by_name(body: dict[str, Any], param: str, message: str) -> None:
    response, submitted = await asked(body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param or error["message"].startswith(param)
    assert message in error["message"]
    assert not submitted


async def test_a_voice_may_be_named_in_an_object() -> None:
    _, [event] = await asked({"voice": {"id": "leo"}})
    assert event.params.voice == "leo"


async def test_a_text_model_does_not_speak() -> None:
    async with deployment() as world:
        response = await world.client.post("/v1/audio/speech", json=ASKED)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "unsupported_modality"


async def test_a_speech_model_does_not_chat() -> None:
    async with deployment(speak, served=SPEAKER) as world:
        messages = [{"role": "user", "content": "Hello?"}]
        chat = await world.client.post("/v1/chat/completions", json={"model": "demo", "messages": messages})
        completion = await world.client.post("/v1/completions", json={"model": "demo", "prompt": "Hello"})
    for response in (chat, completion):
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "unsupported_modality"
        assert "POST /v1/audio/speech" in response.json()["error"]["message"]


async def test_a_failure_before_any_sound_is_an_error_like_any_other() -> None:
    async def fail(performance: Performance) -> None:
        performance.fail(Failure(code="worker_lost", message="it died"))

    async with deployment(fail, served=SPEAKER) as world:
        response = await world.client.post("/v1/audio/speech", json=ASKED)
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "worker_lost"


@pytest.mark.processes
async def test_half_of_an_answer_is_not_taken_for_all_of_it() -> None:
    async def fail(performance: Performance) -> None:
        performance.sound(PIECES[0])
        await asyncio.sleep(0)
        performance.fail(Failure(code="worker_lost", message="it died"))

    async with (
        deployment(fail, served=SPEAKER) as world,
        listening(world) as url,
        httpx.AsyncClient() as client,
    ):
        with pytest.raises(httpx.RemoteProtocolError):
            await client.post(f"{url}/v1/audio/speech", json=ASKED | {"response_format": "pcm"})


async def test_a_request_that_takes_too_long_is_cancelled() -> None:
    async def never(performance: Performance) -> None:
        await performance.cancelled.wait()

    settings = GatewaySettings(request_timeout_s=0.05)
    async with deployment(never, served=SPEAKER, settings=settings) as world:
        response = await world.client.post("/v1/audio/speech", json=ASKED)
    assert response.status_code == 504


# ---- /generate ---------------------------------------------------------------------------------------
async def test_generate_puts_out_what_the_model_does() -> None:
    async with deployment(speak, served=SPEAKER) as world:
        response = await world.client.post("/generate", data={"text": "Hello", "streaming": "false"})
    entries = response.json()["outputs"]["audio"]
    assert [b64decode(entry["data"]) for entry in entries] == PIECES
    assert entries[0]["metadata"]["sample_rate"] == 24_000


async def test_generate_takes_the_words_of_mstar() -> None:
    kwargs = {
        "voice": "leo",
        "temperature": 0.6,
        "top_p": 0.8,
        "repetition_penalty": 1.3,
        "max_output_tokens": 100,
        "ignore_eos": True,
        "seed": 7,
    }
    form = {"text": "Hello", "output_modalities": "audio", "model_kwargs": json.dumps(kwargs)}
    async with deployment(speak, served=SPEAKER) as world:
        response = await world.client.post("/generate", data=form)
        [event] = [event for event in world.events("request") if isinstance(event, RequestSubmitted)]
    lines = [json.loads(line) for line in response.text.splitlines()]
    assert [b64decode(line["data"]) for line in lines if line["modality"] == "audio"] == PIECES
    assert event.params.voice == "leo"
    assert event.params.max_tokens == 100
    assert event.params.ignore_eos


async def test_generate_refuses_a_voice_there_is_not() -> None:
    form = {"text": "Hello", "model_kwargs": json.dumps({"voice": "alloy"})}
    async with deployment(speak, served=SPEAKER) as world:
        response = await world.client.post("/generate", data=form)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "model_kwargs.voice"


async def test_tracks_are_told_in_the_logs_order_with_one_count() -> None:
    async def two(performance: Performance) -> None:
        performance.sound(PIECES[0], "a")
        performance.sound(PIECES[1], "b")
        performance.sound(PIECES[2], "a")
        await asyncio.sleep(0)
        performance.finish()

    async with deployment(two, served=SPEAKER) as world:
        response = await world.client.post("/generate", data={"text": "Hello"})
    lines = [json.loads(line) for line in response.text.splitlines()]
    assert [line["metadata"]["index"] for line in lines[:-1]] == [0, 1, 2]
    assert [b64decode(line["data"]) for line in lines[:-1]] == PIECES


class SpeechOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Speech.

    Attributes:
        instructions: the manner.
        language: of the text.
        talker_top_k: the likeliest codes.
    """

    instructions: str = ""
    language: Literal["English", "German"] | None = None
    talker_top_k: Annotated[int, Meta(ge=0)] = 50


async def test_fields_and_options_of_a_family_become_its_options() -> None:
    served = replace(SPEAKER, options=SpeechOptions)
    body = {"instructions": "whisper", "language": "German", "talker_top_k": 5, "seed": 3}
    async with deployment(speak, served=served) as world:
        response = await world.client.post("/v1/audio/speech", json=ASKED | body)
        refused = await world.client.post("/v1/audio/speech", json=ASKED | {"language": "Elvish"})
        twice = await world.client.post(
            "/v1/audio/speech", json=ASKED | {"language": "German", "options": {"language": "English"}}
        )
        [event] = [event for event in world.events("request") if isinstance(event, RequestSubmitted)]
    assert response.status_code == 200
    assert event.params.options == {"instructions": "whisper", "language": "German", "talker_top_k": 5}
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "language")
    assert (twice.status_code, twice.json()["error"]["param"]) == (400, "language")


async def test_the_voices_are_listed_the_usual_one_first() -> None:
    async with deployment(speak, served=SPEAKER) as world:
        assert (await world.client.get("/v1/audio/voices")).json() == {"voices": ["tara", "leo"]}
