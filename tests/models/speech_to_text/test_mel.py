"""Features of windows are those of the whole file, by transformers' extractor."""

import numpy as np
import pytest
from transformers import WhisperFeatureExtractor

from models.speech_to_text.mel import LoudestFrame, MelSettings, window_features

EXTRACTOR = WhisperFeatureExtractor(chunk_length=2)
SETTINGS = MelSettings.of(EXTRACTOR)


@pytest.mark.parametrize("samples", [1, 100, 1_000, 20_013, 32_000, 32_100, 75_077])
def test_every_window_is_a_part_of_the_whole(samples: int) -> None:
    random = np.random.default_rng(samples)
    sound = (random.standard_normal(samples) * np.linspace(0.01, 0.5, samples)).astype(np.float32)
    is_long = samples > SETTINGS.samples
    padding = {"truncation": False, "padding": "longest"} if is_long else {}
    whole = EXTRACTOR(sound, sampling_rate=16_000, return_tensors="np", **padding).input_features[0]
    loudest = LoudestFrame(settings=SETTINGS)
    for first in range(0, samples, 7_777):
        loudest.add(sound[first : first + 7_777])
    value = loudest.finish()
    for first in range(0, whole.shape[1], 90):
        expected = whole[:, first : first + SETTINGS.frames]
        expected = np.pad(expected, ((0, 0), (0, SETTINGS.frames - expected.shape[1])))
        found = window_features(
            SETTINGS, lambda at, count: sound[at : at + count], samples=samples, first=first, loudest=value
        )
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)


def test_the_loudest_frame_of_the_file_matters_in_other_windows() -> None:
    sound = np.random.default_rng(0).standard_normal(64_000).astype(np.float32) * 1e-3

    def features(loudest: float) -> np.ndarray:
        return window_features(
            SETTINGS, lambda at, count: sound[at : at + count], samples=64_000, first=0, loudest=loudest
        )

    assert np.abs(features(6.0) - features(0.0)).max() > 0.1
