"""Windows of a file without times: cut at pauses, the same however its samples arrive."""

import numpy as np
import pytest
import torch
from transformers import CohereAsrFeatureExtractor

from models.speech_to_text.mel import RATE
from models.speech_to_text.pauses import STEP, Floats, Levels, Window
from tests.tiny.whisper import sound

LONGEST, SEARCH = 8 * RATE, 2 * RATE


def windows(samples: Floats, *, pieces: int = 1) -> list[Window]:
    levels = Levels()
    for block in np.array_split(samples, pieces):
        levels.add(block)
    return levels.windows(LONGEST, SEARCH)


@pytest.mark.parametrize("count", [1, 319, 320, LONGEST - 1, LONGEST])
def test_a_file_that_fits_is_one_window(count: int) -> None:
    [found] = windows(np.full(count, 0.5, np.float32))
    assert (found.first, found.count, found.loudest) == (0, count, 0.5)


@pytest.mark.parametrize("count", [LONGEST + 1, LONGEST + 700, 3 * LONGEST + 5, 10 * LONGEST])
def test_windows_are_the_whole_file_without_gaps(count: int) -> None:
    samples = sound(count / RATE + 1)[:count]
    found = windows(samples)
    assert [one.first for one in found] == [0, *np.cumsum([one.count for one in found])[:-1]]
    assert sum(one.count for one in found) == count
    assert max(one.count for one in found) <= LONGEST
    assert min(one.count for one in found) > STEP
    assert {one.first % STEP for one in found} == {0}
    assert windows(samples, pieces=97) == found


def test_a_window_ends_in_a_pause() -> None:
    samples = sound(12.0, 1)
    samples[int(6.4 * RATE) : int(6.55 * RATE)] *= 0.001
    first, second = windows(samples)
    assert second.first == 6.4 * RATE
    assert first.count + second.count == len(samples)


def test_of_equal_pauses_the_first_one_counts() -> None:
    found = windows(np.zeros(12 * RATE, np.float32))
    assert [one.first for one in found] == [0, LONGEST - SEARCH]
    assert {one.loudest for one in found} == {0.0}


@pytest.mark.parametrize("seconds", [34.9, 35.0, 35.01, 97.3])
def test_cuts_are_those_of_transformers(seconds: float) -> None:
    samples = sound(seconds, 3)
    levels = Levels()
    levels.add(samples)
    chunks = CohereAsrFeatureExtractor()._split_audio_chunks_energy(torch.as_tensor(samples))
    found = levels.windows(35 * RATE, 5 * RATE)
    assert [one.count for one in found] == [len(chunk) for chunk in chunks]
