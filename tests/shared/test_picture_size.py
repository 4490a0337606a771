"""Sizes of pictures as texts."""

import pytest

from shared.picture_size import sides_of


def test_width_stands_before_height() -> None:
    assert sides_of("1024x768") == (1024, 768)


@pytest.mark.parametrize(
    "size", ["", "1024", "0x5", "5x0", "1024X768", " 5x5", "5x5\n", "-5x5", "100000x5", "\u0665x5"]
)
def test_other_texts_are_no_size(size: str) -> None:
    assert sides_of(size) is None
