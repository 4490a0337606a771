"""Refusals before a file is decoded, and the features of windows."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from models.checkpoints.files import CheckpointError
from models.media.in_process import InProcessReader
from models.media.kinds import MediaError
from models.text.tokenizer import load_tokenizer
from models.whisper.graph import Heard, remarks
from models.whisper.languages import Languages
from models.whisper.processing import WhisperProcessing, load
from models.whisper.settings import WhisperSettings
from models.whisper.window_text import WindowText, WindowTokens
from shared.errors import ClientError
from shared.events import Inputs, Media
from tests.models.whisper.served import wav
from tests.tiny import whisper as tiny

DIGEST = f"{1:064x}"


def processing(folder: Path, file: bytes = b"no sound") -> WhisperProcessing:
    return load(folder, max_seq_len=448, media=InProcessReader({DIGEST: file}))


def listen(folder: Path, file: bytes = b"no sound", **options: Any) -> Heard:
    inputs = Inputs(text="", files=[Media(modality="audio", digest=DIGEST)])
    args = {"inputs": msgspec.to_builtins(inputs), "options": options}
    return msgspec.convert(dict(processing(folder, file).run("listen", "k", {}, args).facts), Heard)


@pytest.fixture(scope="module")
def english(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("english")
    tiny.write(folder, is_multilingual=False)
    return folder


@pytest.mark.parametrize(
    ("options", "code", "named"),
    [
        ({"language": "klingon"}, "unknown_language", "klingon"),
        ({"language": "it"}, "unknown_language", "de, en, es, fr, ja, zh"),
        ({"prompt": "a <|nospeech|> b"}, "invalid_value", "special tokens"),
    ],
)
def test_options_are_refused_before_the_file_is_decoded(
    options: dict[str, Any], code: str, named: str
) -> None:
    with pytest.raises(ClientError, match=named) as refused:
        listen(tiny.tiny_whisper(), **options)
    assert refused.value.code == code


def test_the_times_of_a_window_without_times_stay_in_its_sound() -> None:
    settings = WhisperSettings.read(tiny.tiny_whisper())
    first = settings.first_time
    tokens = WindowTokens(
        tokens=[5, first + 70, first + 1, 6, first + 9, first + 99, first + 99],
        logprobs=[0.0] * 7,
        attention=np.zeros(0, np.float32),
        avg_logprob=0.0,
        compression_ratio=1.0,
        no_speech_prob=0.0,
        temperature=0.0,
        is_silent=False,
        language=-1,
    )
    text = WindowText(
        settings=settings,
        tokenizer=load_tokenizer(tiny.tiny_whisper())[0],
        languages=Languages(settings),
        tokens=tokens,
        seek=0,
        frames=200,
        sounding=150,
        first_segment=0,
    )
    found = text.transcript(duration=1.5, total=200, has_times=False, has_words=False)
    times = [(one.start, one.end) for one in found.segments]
    assert times == [(0.0, 1.4), (0.02, 0.18), (1.5, 1.5)]


@pytest.mark.parametrize("file", [b"no sound", b"", wav(np.zeros(0, np.float32))])
def test_a_file_without_sound_is_refused(file: bytes) -> None:
    with pytest.raises(MediaError):
        listen(tiny.tiny_whisper(), file)


@pytest.mark.parametrize("language", ["german", "DE", " de "])
def test_languages_have_codes_and_names(language: str) -> None:
    heard = listen(tiny.tiny_whisper(), wav(tiny.sound(0.5)), language=language)
    assert heard.language == WhisperSettings.read(tiny.tiny_whisper()).languages["de"]


def test_a_model_of_english_knows_nothing_else(english: Path) -> None:
    assert listen(english, wav(tiny.sound(0.5)), language="en").language is None
    for options in ({"language": "de"}, {"task": "translate"}):
        with pytest.raises(ClientError):
            listen(english, wav(tiny.sound(0.5)), **options)


def test_a_long_prompt_keeps_its_end() -> None:
    settings = WhisperSettings.read(tiny.tiny_whisper())
    heard = listen(tiny.tiny_whisper(), wav(tiny.sound(0.5)), prompt="one " * 99 + "the end")
    short = listen(tiny.tiny_whisper(), wav(tiny.sound(0.5)), prompt="the end")
    assert len(heard.prompt_ids) == 1 + settings.longest_prompt
    assert heard.prompt_ids[0] == settings.previous
    assert heard.prompt_ids[-2:] == short.prompt_ids[-2:]


def test_a_file_longer_than_a_window_has_times() -> None:
    assert not listen(tiny.tiny_whisper(), wav(tiny.sound(2.0))).has_times
    heard = listen(tiny.tiny_whisper(), wav(tiny.sound(2.5)))
    assert (heard.has_times, heard.frames, heard.samples) == (True, 250, 40_000)


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("preprocessor_config.json", None, "preprocessor_config.json"),
        ("preprocessor_config.json", '{"chunk_length": 30}', "max_source_positions"),
        ("generation_config.json", "{}", "no_timestamps_token_id"),
    ],
)
def test_a_checkpoint_whose_files_do_not_fit_is_refused(
    tmp_path: Path, name: str, content: str | None, named: str
) -> None:
    for file in tiny.tiny_whisper().iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(CheckpointError, match=named):
        processing(tmp_path)


def test_the_languages_are_told_of_a_checkpoint(english: Path) -> None:
    assert remarks(tiny.tiny_whisper(), {}) == [
        "it transcribes de, en, es, fr, ja, zh, and translates them into English"
    ]
    assert "English alone" in remarks(english, {})[0]
    assert remarks(english / "none", {}) == []
