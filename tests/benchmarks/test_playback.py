"""A listener's view of streamed sound."""

import pytest

from benchmarks.playback import Chunk, Playback, percentile, played


def test_chunks_that_come_in_time_are_played_without_a_pause() -> None:
    chunks = [Chunk(0.2, 1.0), Chunk(0.9, 1.0), Chunk(2.2, 1.0)]

    assert played(chunks) == Playback(first_s=0.2, underruns=0, silent_s=0.0)


def test_a_late_chunk_is_an_underrun_and_its_delay_is_silence() -> None:
    found = played([Chunk(0.5, 1.0), Chunk(2.0, 0.5), Chunk(2.1, 1.0), Chunk(4.0, 1.0)])

    assert (found.first_s, found.underruns) == (0.5, 2)
    assert found.silent_s == pytest.approx(0.5 + 0.5)


def test_chunks_without_sound_are_not_the_first_sound() -> None:
    assert played([Chunk(0.1, 0.0), Chunk(0.7, 1.0)]).first_s == 0.7
    with pytest.raises(ValueError, match="found none"):
        played([Chunk(0.1, 0.0)])


@pytest.mark.parametrize(("share", "found"), [(0.5, 5.0), (0.95, 10.0), (0.9, 9.0), (0.01, 1.0), (1.0, 10.0)])
def test_a_percentile_is_one_of_the_values(share: float, found: float) -> None:
    assert percentile([float(n) for n in range(10, 0, -1)], share) == found
