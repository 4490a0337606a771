"""Attempts at a window: silence, repetitions, temperatures, and the seeds of draws."""

from typing import Any

import pytest
import torch

from models.speech_to_text.attempt import Attempt
from models.speech_to_text.options import SpeechOptions, temperatures
from models.speech_to_text.transcript import compression_ratio
from models.whisper.attempt import is_poor, is_silent
from tests.models.whisper.served import Answer, transcribe
from tests.tiny.whisper import sound

SOUND = sound(1.6, 1)


def attempt(
    logprob: float = -0.5, no_speech: float = 0.0, temperature: float = 0.0, seed: int = 1
) -> Attempt:
    found = Attempt(
        before=[0], processors=lambda _, scores: scores, temperature=temperature, most=8, ends={9}, seed=seed
    )
    found.tokens, found.logprobs, found.no_speech = [3, 9], [logprob, logprob], no_speech
    return found


@pytest.mark.parametrize(
    ("logprob", "no_speech", "options", "silent"),
    [
        (-1.5, 0.7, {}, True),
        (-1.5, 0.5, {}, False),
        (-0.5, 0.7, {}, False),
        (-1.5, 0.7, {"no_speech_threshold": None}, False),
        (-0.5, 0.7, {"logprob_threshold": None}, True),
    ],
)
def test_silence_is_unlikely_text_where_nobody_seems_to_speak(
    logprob: float, no_speech: float, options: dict[str, Any], silent: bool
) -> None:
    assert is_silent(attempt(logprob, no_speech), SpeechOptions(**options)) is silent


@pytest.mark.parametrize(
    ("logprob", "ratio", "options", "poor"),
    [
        (-0.5, 2.3, {}, False),
        (-0.5, 2.5, {}, True),
        (-1.1, 1.0, {}, True),
        (-1.1, 2.5, {"compression_ratio_threshold": None, "logprob_threshold": None}, False),
    ],
)
def test_repetitions_and_unlikely_texts_are_tried_again(
    logprob: float, ratio: float, options: dict[str, Any], poor: bool
) -> None:
    assert is_poor(attempt(logprob), ratio, SpeechOptions(**options)) is poor


def test_repetitions_compress_well() -> None:
    assert (
        compression_ratio("the the the " * 20) > 2.4 > compression_ratio("seven wizards quietly mix liquids")
    )
    assert compression_ratio("") < 1


def test_temperatures_rise_to_one() -> None:
    assert temperatures(None) == temperatures(0.0) == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert temperatures(0.7) == [0.7, 0.9]
    assert temperatures(1.5) == [1.5]


def test_the_end_is_no_text_and_counts_in_the_mean() -> None:
    found = attempt()
    found.logprobs = [-1.0, -3.0]
    assert (found.text_tokens, found.avg_logprob, found.is_over) == ([3], -2.0, True)


def test_draws_depend_on_the_seed_alone() -> None:
    logits = torch.linspace(0, 1, 9)

    def drawn(seed: int) -> list[int]:
        one = attempt(temperature=1.0, seed=seed)
        one.tokens = []
        return [one.take(logits) for _ in range(7)]

    assert drawn(1) == drawn(1) != drawn(2)


def run(**options: Any) -> Answer:
    [found] = transcribe({"sound": SOUND, "timestamps": ["segment"], **options})
    return found


def test_a_poor_text_is_tried_at_every_temperature_and_the_last_one_stays() -> None:
    kept = {"no_speech_threshold": None, "compression_ratio_threshold": None}
    found, again = transcribe(
        *[{"sound": SOUND, "timestamps": ["segment"], "logprob_threshold": -1e-6, "seed": 4, **kept}] * 2
    )
    assert {one.temperature for window in found.windows for one in window.segments} == {1.0}
    assert found.tokens == again.tokens
    plain = run(logprob_threshold=None, **kept)
    assert {one.temperature for window in plain.windows for one in window.segments} == {0.0}
    assert plain.tokens != found.tokens


def test_a_silent_window_has_no_text() -> None:
    found = run(no_speech_threshold=0.0, logprob_threshold=None)
    assert found.texts == [""]
    [window] = found.windows
    assert (window.segments, window.final) == ([], True)
