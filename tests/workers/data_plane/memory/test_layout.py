"""What is where in an arena's file."""

import pytest

from workers.data_plane.memory.layout import HEADER_BYTES, PAGE, PAIR_BYTES, WORDS_AT, Layout, LayoutError


@pytest.mark.parametrize("payload", [1, PAGE, PAGE + 1, 1 << 20, (1 << 30) + 5])
def test_every_page_has_its_words_before_the_first_page(payload: int) -> None:
    layout = Layout.holding(payload, epoch=7)
    assert layout.pages * PAGE >= payload > (layout.pages - 1) * PAGE
    assert layout.payload_at % PAGE == 0
    last = layout.length - PAGE
    assert layout.begins_tensor(last)
    assert WORDS_AT + layout.word_of(last) * 8 + PAIR_BYTES <= layout.payload_at
    assert layout.word_of(layout.payload_at) == 0


def test_a_tensor_begins_only_at_the_beginning_of_a_page() -> None:
    layout = Layout.holding(1 << 20, epoch=7)
    for offset in (-PAGE, 0, layout.payload_at - PAGE, layout.payload_at + 1, layout.length, 1 << 60):
        assert not layout.begins_tensor(offset)


def test_a_header_says_what_it_was_made_of() -> None:
    layout = Layout.holding(1 << 20, epoch=(1 << 63) - 1)
    assert len(layout.header()) == HEADER_BYTES
    assert Layout.read(layout.header(), layout.length) == layout


@pytest.mark.parametrize("length", [0, -PAGE, PAGE])
def test_a_header_that_does_not_fit_its_file_is_none(length: int) -> None:
    layout = Layout.holding(1 << 20, epoch=7)
    if length == 0:
        with pytest.raises(LayoutError):
            Layout.read(b"x" * HEADER_BYTES, layout.length)
        with pytest.raises(LayoutError, match="found 3"):
            Layout.read(b"abc", layout.length)
    else:
        with pytest.raises(LayoutError):
            Layout.read(layout.header(), layout.length + length)
