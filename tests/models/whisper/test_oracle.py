"""Whisper against transformers' `generate`: tokens, times and languages of all requests, computed at once."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from models.media.in_process import InProcessReader
from models.whisper.processing import load as load_processing
from models.whisper.settings import WhisperSettings
from tests.models.whisper import oracle
from tests.models.whisper.served import Answer, transcribe
from tests.tiny import whisper as tiny
from tests.tiny.whisper import sound, tiny_whisper

OFF: dict[str, Any] = {
    "no_speech_threshold": None,
    "compression_ratio_threshold": None,
    "logprob_threshold": None,
}
PROMPT = "the quick brown fox"
CASES: dict[str, dict[str, Any]] = {
    "short": {"sound": sound(1.3, 0)},
    "short with times": {"sound": sound(1.7, 1), "timestamps": ["segment"]},
    "three windows": {"sound": sound(5.2, 2), "timestamps": ["segment"]},
    "words": {"sound": sound(7.9, 3), "timestamps": ["word"]},
    "german": {"sound": sound(1.3, 0), "language": "german"},
    "translated": {"sound": sound(4.1, 4), "language": "fr", "task": "translate"},
    "with a prompt": {"sound": sound(4.1, 4), "prompt": PROMPT},
}


@cache
def answers() -> dict[str, Answer]:
    found = transcribe(*({**OFF, **case} for case in CASES.values()))
    return dict(zip(CASES, found, strict=True))


@cache
def expected(name: str) -> dict[str, Any]:
    case = CASES[name]
    is_long = len(case["sound"]) > 32_000
    options: dict[str, Any] = {"task": case.get("task", "transcribe"), "language": case.get("language")}
    has_times = is_long or "timestamps" in case
    options |= {"return_timestamps": has_times, "return_segments": has_times}
    if "word" in case.get("timestamps", ()):
        options["return_token_timestamps"] = True
    if "prompt" in case:
        processing = load_processing(tiny_whisper(), max_seq_len=448, media=InProcessReader({}))
        options["prompt_ids"] = torch.tensor(processing._prompt_ids(case["prompt"]))
    return oracle.generate(tiny_whisper(), case["sound"], **options)


@pytest.mark.parametrize("name", CASES)
def test_the_tokens_are_those_of_generate(name: str) -> None:
    found = expected(name)["sequences"][0].tolist()
    assert answers()[name].tokens == found
    assert len(set(found)) > 8


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("short", "german")])
def test_the_times_of_segments_are_those_of_generate(name: str) -> None:
    segments = expected(name)["segments"][0]
    assert answers()[name].times == [
        (round(float(one["start"]), 2), round(float(one["end"]), 2)) for one in segments
    ]
    assert len({*answers()[name].times}) > 2


def test_every_word_has_the_times_of_its_tokens() -> None:
    segments = [one for window in answers()["words"].windows for one in window.segments]
    begun = 0
    for segment, given in zip(segments, expected("words")["segments"][0], strict=True):
        times = [round(float(time), 2) for time in given["token_timestamps"]]
        assert isinstance(segment.words, list)
        assert "".join(word.word for word in segment.words) == segment.text
        assert [word.end for word in segment.words if word.end not in times] == []
        assert all(0 < word.probability <= 1 and word.start <= word.end for word in segment.words)
        begun += len({word.end for word in segment.words})
    assert begun > 10


def test_the_language_is_detected_by_the_sound() -> None:
    found = {
        name: answers()[name].windows[0].language for name, case in CASES.items() if "language" not in case
    }
    settings = WhisperSettings.read(tiny_whisper())
    for name, code in found.items():
        assert oracle.language(tiny_whisper(), CASES[name]["sound"]) == settings.languages[code]
    assert len({*found.values()}) > 1
    assert answers()["german"].windows[0].language == "de"


def test_options_and_sound_matter() -> None:
    tokens = {name: tuple(answer.tokens) for name, answer in answers().items()}
    assert len({*tokens.values()}) == len(CASES)


def test_chunks_are_windows_in_order() -> None:
    answer = answers()["words"]
    seeks = [window.seek for window in answer.windows]
    assert seeks == sorted(seeks)
    assert [window.next_seek for window in answer.windows[:-1]] == seeks[1:]
    assert [window.final for window in answer.windows] == [*[False] * (len(seeks) - 1), True]
    assert {round(window.duration, 3) for window in answer.windows} == {7.9}
    assert answer.texts == [window.text for window in answer.windows]
    ids = [one.id for window in answer.windows for one in window.segments]
    assert ids == [*range(len(ids))]
    assert answer.finish is not None
    assert answer.finish.usage.counts == {"windows": len(seeks), "audio_ms": 7900}


def test_a_model_of_english_has_no_language_and_no_task(tmp_path: Path) -> None:
    tiny.write(tmp_path, seed=1, is_multilingual=False)
    settings = json.loads((tmp_path / "generation_config.json").read_text())
    del settings["lang_to_id"], settings["task_to_id"]  # as published
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    samples = sound(3.3, 5)
    [found] = transcribe({**OFF, "sound": samples, "language": "en"}, checkpoint=tmp_path)
    given = oracle.generate(tmp_path, samples, return_timestamps=True, return_segments=True)
    assert found.tokens == given["sequences"][0].tolist()
    assert {window.language for window in found.windows} == {"en"}
