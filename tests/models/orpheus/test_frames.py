"""The samples that each chunk of a stream of audio tokens yields, by counts."""

import pytest

from models.base import ChunkOf
from models.orpheus.frames import FRAME_SAMPLES, FRAME_TOKENS, LEVELS, samples_of
from models.orpheus.graph import SOUND
from shared.walks.chunks import Cutter


def frames_of(tokens: int) -> list[tuple[ChunkOf, int, int]]:
    """The chunks of a stream of that many tokens, with the first frame and the number of whole frames."""
    chunks = Cutter(SOUND.chunks, SOUND.after_end).cut(tokens, ended=True)
    return [
        (
            ChunkOf(number=chunk.number, fresh=chunk.fresh, last=chunk.last),
            chunk.start // FRAME_TOKENS,
            (chunk.stop - chunk.start) // FRAME_TOKENS,
        )
        for chunk in chunks
    ]


@pytest.mark.parametrize("tokens", [*range(72), 700, 703])
def test_every_whole_frame_is_emitted_once_and_in_order(tokens: int) -> None:
    sounding: list[tuple[int, int]] = []
    for chunk, first, frames in frames_of(tokens):
        taken = samples_of(chunk, frames)
        sounding += [(first * FRAME_SAMPLES + taken.start, first * FRAME_SAMPLES + taken.stop)]

    heard = [sample for begin, end in sounding for sample in range(begin, end)]
    assert heard == list(range(tokens // FRAME_TOKENS * FRAME_SAMPLES))


def test_a_window_yields_its_second_frame_and_the_first_window_its_first_too() -> None:
    found = [samples_of(chunk, frames) for chunk, _, frames in frames_of(6 * FRAME_TOKENS)]

    assert found == [slice(0, 4096), slice(2048, 4096), slice(2048, 4096), slice(2048, 3 * 2048)]


def test_a_text_shorter_than_a_window_is_one_final_chunk() -> None:
    [(chunk, _, frames)] = frames_of(27)

    assert chunk.last
    assert samples_of(chunk, frames) == slice(0, 3 * 2048)


def test_the_seven_tokens_of_a_frame_are_each_a_code_of_one_level() -> None:
    assert sorted(place for level in LEVELS for place in level) == list(range(FRAME_TOKENS))
    assert [len(level) for level in LEVELS] == [1, 2, 4]
