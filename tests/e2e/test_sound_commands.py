"""`dalsegno transcribe` and `dalsegno ask --out speech.mp3` over the real command line."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import av
import httpx
import pytest

from dalsegno.config import environment
from tests.e2e import clients, deploy
from tests.e2e.deploy import Running
from tests.models.whisper.served import wav
from tests.tiny.orpheus import tiny_orpheus
from tests.tiny.whisper import sound, tiny_whisper

pytestmark = pytest.mark.timeout(200)

FORMATS: Final = {"aac": "aac", "flac": "flac", "mp3": "mp3float", "opus": "opus", "wav": "pcm_s16le"}
SEEDED: Final = ("--max-tokens", "120", "--seed", "6")


def run(running: Running, command: str, *arguments: str) -> tuple[int, str, str]:
    done = clients.run(command, *arguments, "--url", running.url, env=environment.of(running.client))
    return done.returncode, done.stdout, done.stderr


# ---- speech -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("speaking")
    with deploy.serve(folder, "--checkpoint", str(tiny_orpheus()), model="orpheus") as running:
        yield running


@pytest.mark.parametrize("extension", FORMATS)
def test_speech_is_saved_in_the_format_of_the_file(speaking: Running, tmp_path: Path, extension: str) -> None:
    path = tmp_path / f"hello.{extension}"

    status, shown, error = run(speaking, "ask", "good morning", "--out", str(path), "--voice", "leo", *SEEDED)

    assert (status, shown.strip()) == (0, str(path)), error
    with av.open(path) as file:
        [stream] = file.streams.audio
        assert stream.codec_context.name in (FORMATS[extension], extension)
        assert sum(frame.samples for frame in file.decode(stream)) / stream.rate > 0.3


def test_two_voices_differ(speaking: Running, tmp_path: Path) -> None:
    paths = [tmp_path / f"{voice}.flac" for voice in ("leo", "tara")]

    for path in paths:
        run(speaking, "ask", "good morning", "--out", str(path), "--voice", path.stem, *SEEDED)

    assert paths[0].read_bytes() != paths[1].read_bytes()


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--out", "x.mp3", "--voice", "nobody"), "expected one of"),
        (("--out", "x.wav", "--voice", "nobody"), "expected one of"),
        (("--out", "x.png", "--voice", "leo"), "--voice is that of speech"),
        (("--voice", "leo"), "--voice is that of speech"),
        (("--out", "x.ogg"), "expected a file name that ends in one of"),
    ],
)
def test_what_cannot_be_spoken_is_one_line(
    speaking: Running, tmp_path: Path, arguments: tuple[str, ...], why: str
) -> None:
    placed = [str(tmp_path / one) if one.startswith("x.") else one for one in arguments]

    status, _, error = run(speaking, "ask", "hello", *placed)

    assert status != 0
    assert why in error
    assert "Traceback" not in error
    assert not list(tmp_path.iterdir())


def test_an_answer_without_sound_leaves_no_file(speaking: Running, tmp_path: Path) -> None:
    """One token is less than a frame of sound."""
    path = tmp_path / "x.mp3"

    status, _, error = run(speaking, "ask", "hello", "--out", str(path), "--max-tokens", "1", "--seed", "1")

    assert status == 1
    assert "the answer has no sound" in error
    assert not path.exists()


def test_a_model_that_speaks_transcribes_nothing(speaking: Running, tmp_path: Path) -> None:
    path = tmp_path / "talk.wav"
    path.write_bytes(wav(sound(1.0, 1)))

    status, _, error = run(speaking, "transcribe", str(path))

    assert status == 1
    assert "does not transcribe" in error


# ---- transcripts ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hearing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("hearing")
    with deploy.serve(folder, model=str(tiny_whisper())) as running:
        yield running


def test_a_file_that_is_missing_is_named(hearing: Running) -> None:
    status, _, error = run(hearing, "transcribe", "/nowhere/talk.wav")

    assert status == 1
    assert "/nowhere/talk.wav cannot be read: No such file" in error


@pytest.fixture
def talk(tmp_path: Path) -> Path:
    path = tmp_path / 'a "talk".wav'
    path.write_bytes(wav(sound(5.3, 2)))
    return path


def posted(hearing: Running, talk: Path, route: str = "transcriptions", **fields: str) -> str:
    files = {"file": ("talk.wav", talk.read_bytes(), "audio/wav")}
    model = httpx.get(f"{hearing.url}/v1/models").json()["data"][0]["id"]
    answer = httpx.post(
        f"{hearing.url}/v1/audio/{route}", data={"model": model, **fields}, files=files, timeout=60
    )
    assert answer.status_code == 200, answer.text
    return answer.text


def test_a_transcript_is_printed(hearing: Running, talk: Path) -> None:
    status, shown, error = run(hearing, "transcribe", str(talk))

    assert status == 0, error
    assert shown.strip() == posted(hearing, talk, response_format="text").strip()
    assert shown.strip()


@pytest.mark.parametrize("form", ["json", "srt", "vtt", "verbose_json"])
def test_a_format_is_that_of_the_route(hearing: Running, talk: Path, form: str) -> None:
    status, shown, error = run(hearing, "transcribe", str(talk), "--format", form, "--language", "de")

    assert status == 0, error
    assert shown.strip() == posted(hearing, talk, response_format=form, language="de").strip()


def test_the_name_of_the_file_to_write_says_the_format(hearing: Running, talk: Path, tmp_path: Path) -> None:
    path = tmp_path / "talk.srt"

    status, shown, error = run(hearing, "transcribe", str(talk), "--out", str(path))

    assert (status, shown.strip()) == (0, str(path)), error
    assert path.read_text() == posted(hearing, talk, response_format="srt")


def test_a_translation_is_that_of_its_route(hearing: Running, talk: Path) -> None:
    status, shown, error = run(hearing, "transcribe", str(talk), "--translate")

    assert status == 0, error
    assert shown.strip() == posted(hearing, talk, "translations", response_format="text").strip()


@pytest.mark.parametrize(
    ("content", "arguments", "why"),
    [
        (b"no sound at all", (), "expected"),
        (wav(sound(1.0, 1)), ("--language", "klingon"), "klingon"),
        (b"", (), "found no bytes"),
    ],
)
def test_what_cannot_be_heard_is_one_line(
    hearing: Running, tmp_path: Path, content: bytes, arguments: tuple[str, ...], why: str
) -> None:
    path = tmp_path / "talk.wav"
    path.write_bytes(content)

    status, shown, error = run(hearing, "transcribe", str(path), *arguments)

    assert (status, shown) == (1, "")
    assert why in error
    assert "Traceback" not in error


def test_a_sound_of_many_pieces_arrives_whole(hearing: Running, tmp_path: Path) -> None:
    path = tmp_path / "long.wav"
    path.write_bytes(wav(sound(40.0, 5)))
    assert path.stat().st_size > 1 << 20

    status, shown, error = run(hearing, "transcribe", str(path), "--format", "json")

    assert status == 0, error
    assert json.loads(shown) == json.loads(posted(hearing, path, response_format="json"))
