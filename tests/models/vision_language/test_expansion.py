"""From placeholders in a text to the parts of a prompt."""

import numpy as np
import pytest

from models.sequence_request import PromptPart
from models.vision_language.expansion import PlacedMedium, Seen, expanded, parts_of, placeholders_in
from shared.errors import ClientError

_BOTH = {"image": "<image>", "video": "<video>"}
_PIXELS = np.zeros(1, dtype=np.float32)


def medium(
    rows: int, text: str = "", digest: str = "a", modality: str = "image", **more: object
) -> PlacedMedium:
    seen = Seen(pixels=_PIXELS, text=text, rows=rows, **more)  # type: ignore[arg-type]
    return PlacedMedium(modality=modality, medium=digest, seen=seen)


def test_each_placeholder_is_replaced_by_the_text_of_its_medium() -> None:
    found, around = placeholders_in("a<image>b<video><image>c", _BOTH, ["image", "image", "video"])

    assert found == ["image", "video", "image"]
    assert expanded(around, [medium(1, "(1)"), medium(1, "(v)"), medium(1, "(2)")]) == "a(1)b(v)(2)c"


@pytest.mark.parametrize(
    ("text", "given"),
    [
        ("<image>", []),
        ("", ["image"]),
        ("<image><image>", ["image"]),
        ("<image>", ["image", "image"]),
        ("<image><video>", ["image"]),
        ("<video>", ["image"]),
    ],
)
def test_places_and_media_have_to_be_equally_many(text: str, given: list[str]) -> None:
    with pytest.raises(ClientError, match="expected the chat template to place each") as raised:
        placeholders_in(text, _BOTH, given)

    assert raised.value.code == "media_mismatch"


def test_each_run_of_row_tokens_is_a_part_with_a_digest_of_its_own() -> None:
    ids = [1, 9, 9, 2, 9, 3, 9, 9]

    first, second, third = parts_of(ids, {9}, [medium(3), medium(2, digest="b")])

    assert (first.start, first.count) == (1, 2)
    assert (second.start, second.count) == (4, 1)
    assert (third.start, third.count) == (6, 2)
    assert len({first.digest, second.digest, third.digest}) == 3
    assert {len(part.digest) for part in (first, second, third)} == {32}


def test_media_without_a_token_in_between_are_separate_parts() -> None:
    first, second = parts_of([9, 9, 9], {9}, [medium(2), medium(1, digest="b")])

    assert (first.start, first.count, second.start, second.count) == (0, 2, 2, 1)
    assert first.digest != second.digest


def test_equal_media_have_equal_digests_wherever_they_are() -> None:
    (early,) = parts_of([9, 9, 1], {9}, [medium(2)])
    (late,) = parts_of([1, 2, 9, 9], {9}, [medium(2)])
    (other,) = parts_of([9, 9], {9}, [medium(2, arguments=("wide",))])

    assert early.digest == late.digest != other.digest


def test_parts_say_what_positions_and_masks_need() -> None:
    grids = ((1, 2, 2), (1, 2, 1))

    first, second = parts_of(
        [9, 9, 5, 9], {9}, [medium(3, modality="video", grids=grids, seconds=0.5, full=True)]
    )

    assert first == PromptPart(
        start=0, count=2, digest=first.digest, grid=(1, 2, 2), full=True, seconds=0.5, modality="video"
    )
    assert second.grid == (1, 2, 1)


@pytest.mark.parametrize("ids", [[9], [9, 9, 9], []])
def test_row_tokens_that_belong_to_no_medium_are_refused(ids: list[int]) -> None:
    with pytest.raises(ClientError, match="tokens that stand for media, expected 2"):
        parts_of(ids, {9}, [medium(2)])
