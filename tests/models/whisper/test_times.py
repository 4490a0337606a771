"""Times of segments and tokens."""

import numpy as np
import pytest
from transformers.models.whisper.generation_whisper import _dynamic_time_warping

from models.whisper.alignment import path, token_times
from models.whisper.segments import parts_of

FIRST = 100


def parts(*tokens: int) -> tuple[list[tuple[float, float, int, int]], int]:
    found, moved = parts_of(tokens, first_time=FIRST, seek=400, frames=200)
    return [(round(one.start, 2), round(one.end, 2), one.first, one.stop) for one in found], moved


def test_two_times_in_a_row_end_a_segment_and_the_rest_is_heard_again() -> None:
    assert parts(100, 1, 110, 110, 2, 3, 130, 130, 4) == ([(4.0, 4.2, 0, 3), (4.2, 4.6, 3, 8)], 60)


def test_a_last_time_alone_ends_the_speech_of_the_window() -> None:
    assert parts(100, 1, 110, 110, 2, 130) == ([(4.0, 4.2, 0, 3), (4.2, 4.6, 3, 6)], 200)


@pytest.mark.parametrize(("tokens", "end"), [((100, 1, 140), 4.8), ((1, 2), 6.0), ((100, 1), 6.0), ((), 6.0)])
def test_without_two_times_in_a_row_the_window_is_one_segment(tokens: tuple[int, ...], end: float) -> None:
    assert parts(*tokens) == ([(4.0, end, 0, len(tokens))], 200)


def test_a_window_always_moves_on() -> None:
    assert parts(100, 100, 1)[1] > 0


@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (9, 1), (4, 30), (30, 4), (17, 60)])
def test_the_path_is_transformers_own(shape: tuple[int, int]) -> None:
    random = np.random.default_rng(sum(shape))
    costs = random.standard_normal(shape).round(1)  # with ties
    for found, expected in zip(path(costs), _dynamic_time_warping(costs), strict=True):
        assert found.tolist() == expected.tolist()


def test_a_token_without_weights_has_the_time_before() -> None:
    weights = np.eye(5, 40, dtype=np.float32)[None].repeat(2, axis=0)
    times = token_times(weights, frames=40, width=1)
    assert len(times) == 6
    assert times == sorted(times)
    assert times[-1] == times[-2] > 0
