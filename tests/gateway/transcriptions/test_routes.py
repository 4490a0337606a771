"""`/v1/audio/transcriptions` and `/translations`, by OpenAI's client and by forms."""

import io
import json
import wave
from dataclasses import replace
from typing import Annotated, Any, Final, Literal

import httpx
import msgspec
import numpy as np
import openai
import pytest
from msgspec import Meta

from configs.deployment import MediaSettings
from shared.events import Failure, RequestSubmitted
from shared.output_pieces import piece_spans
from tests.gateway.world import SERVED, Performance, deployment, listening

TRANSCRIPTIONS, TRANSLATIONS = "/v1/audio/transcriptions", "/v1/audio/translations"


class SpeechOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A transcript.

    Attributes:
        task: the language of the text: that of the speech, or English.
        language: of the speech.
        prompt: what was said before.
        timestamps: the times to find.
        no_speech_threshold: above it a window is silence.
    """

    task: Literal["transcribe", "translate"] = "transcribe"
    language: Literal["en", "de"] | None = None
    prompt: str = ""
    timestamps: list[Literal["segment", "word"]] = []
    no_speech_threshold: Annotated[float, Meta(ge=0, le=1)] = 0.6


LISTENER: Final = replace(
    SERVED, modalities=("audio",), outputs=("text", "transcript"), options=SpeechOptions
)
WINDOWS: Final = (
    {
        "language": "de", "language_name": "german", "duration": 41.5,
        "segments": [
            {
                "id": 0, "seek": 0, "start": 0.0, "end": 2.5, "text": " Guten Morgen,", "tokens": [5, 6],
                "temperature": 0.0, "avg_logprob": -0.25, "compression_ratio": 1.1, "no_speech_prob": 0.01,
                "words": [
                    {"word": " Guten", "start": 0.0, "end": 1.0, "probability": 0.9},
                    {"word": " Morgen,", "start": 1.0, "end": 2.5, "probability": 0.8},
                ],
            }
        ],
    },
    {"language": "de", "language_name": "german", "duration": 41.5, "segments": []},
    {
        "language": "de", "language_name": "german", "duration": 41.5,
        "segments": [
            {
                "id": 1, "seek": 3000, "start": 30.0, "end": 31.0, "text": " Herr Doktor.", "tokens": [7],
                "temperature": 0.2, "avg_logprob": -0.5, "compression_ratio": 1.0, "no_speech_prob": 0.02,
                "words": [{"word": " Herr Doktor.", "start": 30.0, "end": 31.0, "probability": 0.7}],
            }
        ],
    },
)  # fmt: skip
TEXT: Final = "Guten Morgen, Herr Doktor."


def sound(seconds: float = 0.1) -> bytes:
    """A WAV file."""
    target = io.BytesIO()
    with wave.open(target, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes(np.zeros(int(seconds * 16_000), np.int16).tobytes())
    return target.getvalue()


FILE: Final = {"file": ("speech.wav", sound(), "audio/wav")}


async def hear(performance: Performance) -> None:
    """Say each window's text and its JSON, the last one in pieces."""
    for number, window in enumerate(WINDOWS):
        if text := "".join(str(one["text"]) for one in window["segments"]):  # type: ignore[attr-defined]
            performance.say(text)
        data = json.dumps(window).encode()
        step = 100 if number == 2 else len(data)
        for piece, start, stop in piece_spans("transcript.transcript", len(data), step):
            about = {"dtype": "uint8", "shape": [len(data)], **(piece.metadata if number == 2 else {})}
            performance.value("transcript", data[start:stop], about)
    performance.finish()


async def asked(
    route: str = TRANSCRIPTIONS, fields: dict[str, Any] | None = None, **how: Any
) -> tuple[httpx.Response, list[RequestSubmitted]]:
    files = how.pop("files", FILE)
    async with deployment(how.pop("script", hear), served=how.pop("served", LISTENER), **how) as world:
        data = {"model": "demo", **(fields or {})}
        response = await world.client.post(route, data=data, files=files)
        return response, [one for one in world.events("request") if isinstance(one, RequestSubmitted)]


async def test_a_transcript_has_the_texts_of_all_windows() -> None:
    response, [event] = await asked()
    assert response.json() == {"text": TEXT, "usage": {"type": "duration", "seconds": 41.5}}
    [file] = event.inputs.files
    assert (file.modality, file.content_type, file.size) == ("audio", "audio/wav", len(sound()))
    assert event.inputs.text == ""
    assert event.inputs.output_modalities == ["text", "transcript"]
    assert event.params.options == {"task": "transcribe"}


async def test_fields_become_options() -> None:
    _, [event] = await asked(
        fields={
            "language": "de", "prompt": "12", "temperature": "0.5", "response_format": "verbose_json",
            "timestamp_granularities[]": ["word", "segment"], "no_speech_threshold": "0.4", "seed": "3",
        }
    )  # fmt: skip
    assert event.params.options == {
        "task": "transcribe", "language": "de", "prompt": "12",
        "timestamps": ["segment", "word"], "no_speech_threshold": 0.4,
    }  # fmt: skip
    assert (event.params.seed, event.params.temperature) == (3, 0.5)


@pytest.mark.parametrize("route", [TRANSCRIPTIONS, TRANSLATIONS])
@pytest.mark.parametrize("form", ["srt", "vtt", "verbose_json"])
async def test_a_format_that_states_times_asks_the_model_for_them(route: str, form: str) -> None:
    _, [event] = await asked(route, {"response_format": form})
    assert event.params.options["timestamps"] == ["segment"]
    _, [event] = await asked(route, {"response_format": form, "options": '{"timestamps": []}'})
    assert event.params.options["timestamps"] == []


async def test_an_option_that_the_model_refuses_is_an_error_of_its_field() -> None:
    async def refuse(performance: Performance) -> None:
        failure = Failure(code="invalid_value", message="timestamps: none", status=400, param="timestamps")
        performance.reject(failure)

    fields = {"response_format": "verbose_json", "timestamp_granularities[]": ["word"]}
    error = (await asked(fields=fields, script=refuse))[0].json()["error"]
    assert error["param"] == "timestamp_granularities"
    assert error["message"] == "timestamp_granularities (timestamps): none"


async def test_a_file_of_no_known_format_is_expected_to_be_audio() -> None:
    response, _ = await asked(files={"file": ("a.wav", b"Dear Sir,", "audio/wav")})
    error = response.json()["error"]
    assert (error["param"], error["code"]) == ("file", "unsupported_media")
    assert error["message"] == "file: expected audio, or a video with audio, found text"


async def test_entries_of_an_object_come_one_by_one() -> None:
    _, [event] = await asked(fields={"options[no_speech_threshold]": "0.3", "options[prompt]": "12"})
    assert event.params.options == {"task": "transcribe", "no_speech_threshold": 0.3, "prompt": "12"}
    for fields, param in (
        ({"options": "{}", "options[prompt]": "a"}, None),
        ({"options": "5", "options[prompt]": "a"}, "options[prompt]"),
        ({"options[promt]": "a"}, "options.promt"),
        ({"chunking_strategy[type]": "server_vad"}, "chunking_strategy"),
    ):
        error = (await asked(fields=fields))[0].json().get("error", {})
        assert error.get("param") == param


async def test_a_model_that_does_not_translate_says_so() -> None:
    class TranscribesOnly(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
        """A transcript.

        Attributes:
            task: what is written.
        """

        task: Literal["transcribe"] = "transcribe"

    response, events = await asked(TRANSLATIONS, served=replace(LISTENER, options=TranscribesOnly))
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "not_supported", "model")
    assert "does not translate speech" in error["message"]
    assert events == []


@pytest.mark.parametrize("route", [TRANSCRIPTIONS, TRANSLATIONS])
async def test_a_recording_may_be_larger_than_a_body_in_memory(route: str) -> None:
    file = sound(1.0)
    async with deployment(hear, served=LISTENER, max_body_bytes=len(file) // 2) as world:
        response = await world.client.post(route, data={"model": "demo"}, files={"file": ("a.wav", file)})
    assert response.json()["text"] == TEXT


async def test_a_translation_is_another_task() -> None:
    response, [event] = await asked(TRANSLATIONS, {"response_format": "verbose_json"})
    assert response.json()["task"] == event.params.options["task"] == "translate"
    _, [event] = await asked(TRANSLATIONS, {"language": "de"})
    assert event.params.options == {"task": "translate", "language": "de"}


@pytest.mark.parametrize(
    ("form", "kind", "body"),
    [
        ("text", "text/plain", f"{TEXT}\n"),
        (
            "srt",
            "application/x-subrip",
            (
                "1\n00:00:00,000 --> 00:00:02,500\nGuten Morgen,\n\n"
                "2\n00:00:30,000 --> 00:00:31,000\nHerr Doktor.\n\n"
            ),
        ),
        (
            "vtt",
            "text/vtt",
            (
                "WEBVTT\n\n00:00:00.000 --> 00:00:02.500\nGuten Morgen,\n\n"
                "00:00:30.000 --> 00:00:31.000\nHerr Doktor.\n\n"
            ),
        ),
    ],
)
async def test_a_transcript_is_a_text_or_captions(form: str, kind: str, body: str) -> None:
    response, _ = await asked(fields={"response_format": form})
    assert response.text == body
    assert response.headers["content-type"].startswith(kind)


@pytest.mark.parametrize(
    ("granularities", "lists"),
    [([], {"segments"}), (["word"], {"words"}), (["segment", "word"], {"segments", "words"})],
)
async def test_a_verbose_answer_lists_what_was_asked_for(granularities: list[str], lists: set[str]) -> None:
    fields: dict[str, Any] = {"response_format": "verbose_json"}
    if granularities:
        fields["timestamp_granularities[]"] = granularities
    body = (await asked(fields=fields))[0].json()
    assert body.keys() == {"task", "language", "duration", "text", "usage"} | lists
    assert (body["task"], body["language"], body["duration"]) == ("transcribe", "german", 41.5)
    if "words" in lists:
        assert [word["word"] for word in body["words"]] == ["Guten", "Morgen,", "Herr Doktor."]
        assert body["words"][2] == {"word": "Herr Doktor.", "start": 30.0, "end": 31.0}
    if "segments" in lists:
        assert [one["id"] for one in body["segments"]] == [0, 1]
        assert body["segments"][1]["seek"] == 3000
        assert "words" not in body["segments"][0]


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")  # OpenAI's overloads of `translations`
async def test_openais_client_transcribes_translates_and_streams() -> None:
    file = ("speech.wav", sound())
    async with (
        deployment(hear, served=LISTENER) as world,
        listening(world) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        audio = client.audio
        plain = await audio.transcriptions.create(model="demo", file=file)
        text = await audio.transcriptions.create(model="demo", file=file, response_format="text")
        verbose = await audio.transcriptions.create(
            model="demo", file=file, response_format="verbose_json", timestamp_granularities=["word"]
        )
        translated = await audio.translations.create(model="demo", file=file)
        stream = await audio.transcriptions.create(model="demo", file=file, stream=True)
        events = [event async for event in stream]
    assert (plain.text, text, translated.text) == (TEXT, f"{TEXT}\n", TEXT)
    assert verbose.words is not None
    assert [word.start for word in verbose.words] == [0.0, 1.0, 30.0]
    assert verbose.duration == 41.5
    assert [event.type for event in events] == ["transcript.text.delta"] * 2 + ["transcript.text.done"]
    assert "".join(event.delta for event in events[:2]).strip() == TEXT  # type: ignore[union-attr]
    assert events[2].text == TEXT  # type: ignore[union-attr]


async def test_a_stream_goes_on_after_its_last_event() -> None:
    fields = {"model": "demo", "stream": "true", "request_id": "mine"}
    async with deployment(hear, served=LISTENER) as world:
        whole = await world.client.post(TRANSCRIPTIONS, data=fields, files=FILE)
        first = whole.text.split("\n\n")[0]
        position = first.splitlines()[0].removeprefix("id: ")
        rest = await world.client.post(
            TRANSCRIPTIONS, data=fields, files=FILE, headers={"last-event-id": position}
        )
    assert whole.text == f"{first}\n\n{rest.text}"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"language": "xx"}, "language"),
        ({"temperature": "2"}, "temperature"),
        ({"response_format": "diarized_json"}, "response_format"),
        ({"timestamp_granularities[]": "word"}, "timestamp_granularities"),
        (
            {"timestamp_granularities[]": "hour", "response_format": "verbose_json"},
            "timestamp_granularities[0]",
        ),
        ({"stream": "true", "response_format": "srt"}, "stream"),
        ({"include[]": "logprobs"}, "include"),
        ({"known_speaker_names[]": "agent"}, "known_speaker_names"),
        ({"chunking_strategy": "vad"}, "chunking_strategy"),
        ({"task": "translate"}, "task"),
        ({"langage": "de"}, "langage"),
        ({"model": "other"}, "model"),
        ({"no_speech_threshold": "1.5"}, "no_speech_threshold"),
    ],
)
async def test_what_cannot_be_done_is_refused_before_anything_is_computed(
    fields: dict[str, Any], param: str
) -> None:
    response, events = await asked(fields=fields)
    error = response.json()["error"]
    assert response.status_code == (404 if param == "model" else 400)
    assert error["param"] == param
    assert events == []


@pytest.mark.parametrize(
    ("files", "code", "message"),
    [
        ({}, "missing_required_parameter", "file: expected one audio file, found none"),
        ({"file": ("a.txt", b"hello", "text/plain")}, "unsupported_media", "file: expected audio"),
        ({"file": ("a.wav", b"", "audio/wav")}, "", "file"),
        (
            [("file", ("a.wav", sound())), ("file", ("b.wav", sound()))],
            "too_many_files",
            "file: expected one audio file, found 2",
        ),
        ({"file": ("a.wav", sound()), "audio": ("b.wav", sound())}, "unknown_parameter", "audio"),
    ],
)
async def test_a_form_has_one_audio_file(files: Any, code: str, message: str) -> None:
    response, events = await asked(fields={"x_padding": ""}, files=files or {"nothing": ("", b"")})
    error = response.json()["error"]
    assert response.status_code == 400
    if files:
        assert code in error["code"]
        assert error["message"].startswith(message)
    assert events == []


async def test_a_json_body_and_a_model_that_writes_no_transcripts_are_refused() -> None:
    async with deployment(hear, served=LISTENER) as world:
        body = await world.client.post(TRANSCRIPTIONS, json={"model": "demo"})
    assert (body.status_code, body.json()["error"]["code"]) == (400, "invalid_form")
    deaf, _ = await asked(served=SERVED)
    assert deaf.json()["error"]["code"] == "unsupported_modality"
    assert "does not transcribe" in deaf.json()["error"]["message"]


async def test_a_file_that_the_worker_finds_damaged_is_named_by_its_field() -> None:
    async def refuse(performance: Performance) -> None:
        performance.fail(Failure(code="invalid_media", message="files[0]: it is cut off", status=400))

    response, _ = await asked(script=refuse)
    assert response.json()["error"] == {
        "message": "file: it is cut off", "type": "invalid_request_error", "param": "file",
        "code": "invalid_media",
    }  # fmt: skip


async def test_a_file_above_the_limit_is_refused() -> None:
    response, events = await asked(media=MediaSettings(max_bytes=1024))
    assert response.status_code == 413
    assert events == []
