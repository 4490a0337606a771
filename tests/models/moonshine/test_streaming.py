"""Moonshine's streaming version against transformers' `generate`."""

from functools import cache
from typing import Any

import pytest

from models import registry
from models.moonshine.decoder import StreamingDecoder
from models.moonshine.settings import MoonshineSettings
from tests.models.moonshine import oracle
from tests.models.whisper import served
from tests.models.whisper.served import Answer, Samples
from tests.tiny.moonshine import STREAMING_FRAMES, tiny_streaming
from tests.tiny.whisper import RATE, sound

SHORT: dict[str, Samples] = {
    "one second": sound(1.0, 9),
    "short": sound(2.303, 1),  # not a multiple of 5 ms
    "five seconds": sound(5.2, 3),
    "another": sound(5.2, 7),
}
LONG = sound(14.3, 11)


def transcribe(*requests: dict[str, Any]) -> list[Answer]:
    return served.transcribe(*requests, family="moonshine", checkpoint=tiny_streaming())


@cache
def answers() -> dict[str, Answer]:
    found = transcribe(*({"sound": one} for one in SHORT.values()), {"sound": LONG})
    return dict(zip([*SHORT, "long"], found, strict=True))


@pytest.mark.parametrize("name", SHORT)
def test_the_tokens_are_those_of_generate(name: str) -> None:
    assert answers()[name].tokens == oracle.generate(SHORT[name], folder=tiny_streaming())


def test_what_is_heard_decides_the_text() -> None:
    tokens = [tuple(answer.tokens) for answer in answers().values()]
    assert len({*tokens}) == len(tokens)
    assert len({*answers()["five seconds"].tokens}) > 5


def test_a_longer_file_is_windows() -> None:
    segments = [one for window in answers()["long"].windows for one in window.segments]
    assert len(segments) > 1
    for one in segments:
        part = LONG[round(one.start * RATE) : round(one.end * RATE)]
        assert one.tokens == oracle.generate(part, folder=tiny_streaming())


def test_a_folder_is_served_by_its_family() -> None:
    assert registry.family_of(tiny_streaming()) == "moonshine"


def test_windows_have_no_more_frames_than_positions() -> None:
    settings = MoonshineSettings.read(tiny_streaming())
    assert (settings.frame, settings.multiple) == (320, 80)
    assert settings.longest_window(1.0, 8192) < STREAMING_FRAMES * 320


def test_frames_without_positions_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    monkeypatch.setattr(StreamingDecoder, "frames_of", lambda self, states: self._body.proj(states))
    [answer] = transcribe({"sound": SHORT["five seconds"]})
    assert answer.tokens != oracle.generate(SHORT["five seconds"], folder=tiny_streaming())
