"""The parts of a prompt: positions, ranges of keys, rows, contents of the prefix cache, uncut spans."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from models.sequence_request import PromptPart
from shared.errors import BugError
from workers.kv_engine.prompt_parts import Contents, PromptParts

IDS = [5, 9, 300, 300, 300, 7, 8, 300, 300, 6]
IMAGE = PromptPart(start=2, count=3, digest="aa", grid=(1, 1, 3))
OTHER = PromptPart(start=7, count=2, digest="bb")
ROWS = np.arange(10.0).reshape(5, 2)


def of(parts: Sequence[PromptPart], ids: Sequence[int] = IDS, **changes: Any) -> PromptParts:
    positions = np.arange(len(ids), dtype=np.int32)[None]
    given: dict[str, Any] = {"positions": positions, "next_position": len(ids), "rows": ROWS} | changes
    return PromptParts(ids, parts, **given)


def test_rows_belong_to_the_tokens_of_parts_with_a_digest() -> None:
    parts = of([IMAGE, OTHER])

    rows, places = parts.rows_in(0, 10)
    assert (ROWS[rows].tolist(), places.tolist()) == (ROWS.tolist(), [2, 3, 4, 7, 8])
    rows, places = parts.rows_in(3, 5)  # a span that begins within an image, and ends within another
    assert (rows, places.tolist()) == (slice(1, 4), [0, 1, 4])
    rows, places = parts.rows_in(5, 2)
    assert (len(ROWS[rows]), len(places)) == (0, 0)
    rows, places = parts.rows_in(9, 4)  # the prompt's last token, and generated ones
    assert (len(ROWS[rows]), len(places)) == (0, 0)


def test_positions_continue_after_the_prompt_on_all_axes() -> None:
    prompt = np.array([[0, 1, 2, 2, 2, 3], [0, 1, 2, 3, 4, 5], [0, 1, 2, 2, 3, 3]], np.int32)
    image = PromptPart(start=2, count=3, digest="aa")
    parts = of([image], IDS[:6], positions=prompt, next_position=4, rows=ROWS[:3])

    assert parts.positions_of(1, 3).tolist() == prompt[:, 1:4].tolist()
    assert parts.positions_of(5, 3).tolist() == [[3, 4, 5], [5, 4, 5], [3, 4, 5]]
    assert parts.positions_of(7, 2).tolist() == [[5, 6]] * 3


def test_tokens_of_a_full_part_see_all_of_it() -> None:
    full = PromptPart(start=2, count=3, digest="aa", full=True)
    parts = of([full, OTHER])

    ends, starts = parts.key_ranges(0, 11)
    assert ends.tolist() == [1, 2, 5, 5, 5, 6, 7, 8, 9, 10, 11]
    assert starts.tolist() == list(range(11))  # the window comes after the part
    assert of([full, OTHER], full_ignores_window=True).key_ranges(1, 4)[1].tolist() == [1, 2, 2, 2]
    assert (parts.has_full(0, 2), parts.has_full(4, 1), parts.has_full(5, 5)) == (False, True, False)


@pytest.mark.parametrize(
    ("start", "count", "whole"),
    [(0, 2, 2), (0, 3, 2), (0, 4, 2), (0, 5, 5), (2, 2, 0), (2, 3, 3), (3, 1, 0), (3, 2, 2), (5, 5, 5)],
)
def test_a_span_cuts_no_full_part(start: int, count: int, whole: int) -> None:
    parts = of([PromptPart(start=2, count=3, digest="aa", full=True), OTHER])

    assert parts.whole(start, count) == whole
    assert parts.longest_full == 3


def test_the_rest_of_a_part_is_counted_from_a_cached_prefix_within_it() -> None:
    parts = of([PromptPart(start=2, count=3, digest="aa", full=True), OTHER])

    assert [parts.rest_of_part(start) for start in (2, 3, 4, 5)] == [3, 2, 1, 1]


def test_contents_are_ids_and_media() -> None:
    contents = of([IMAGE, OTHER]).contents

    assert [contents[at] for at in (0, 1, 5, 6, 9)] == [5, 9, 7, 8, 6]
    assert len({*contents[2:5], *contents[7:9]}) == 5
    assert contents[:5] == of([IMAGE], IDS[:6], rows=ROWS[:3]).contents[:5]  # a longer chat begins the same


@pytest.mark.parametrize(
    "other",
    [
        PromptPart(start=2, count=3, digest="ab", grid=(1, 1, 3)),
        PromptPart(start=2, count=3, digest="aa", grid=(1, 3, 1)),
        PromptPart(start=2, count=3, digest="aa", grid=(1, 1, 3), seconds=0.5),
    ],
    ids=["another image", "another grid", "another time"],
)
def test_contents_of_other_media_differ_under_equal_placeholders(other: PromptPart) -> None:
    mine, others = (of([part], IDS[:6], rows=ROWS[:3]).contents for part in (IMAGE, other))

    assert mine[:2] == others[:2]
    assert all(one != another for one, another in zip(mine[2:5], others[2:5], strict=True))


def test_contents_in_a_full_part_depend_on_all_of_it() -> None:
    whole = PromptPart(start=0, count=6, full=True)
    image = PromptPart(start=2, count=3, digest="aa")
    contents = of([whole, image], IDS[:6], rows=ROWS[:3]).contents

    later = of([whole, image], [*IDS[:5], 8], rows=ROWS[:3]).contents
    assert not set(contents) & set(later)
    assert contents == of([whole, image], IDS[:6], rows=ROWS[:3]).contents


def test_contents_of_a_sequence_go_on_with_generated_ids() -> None:
    ids = [*IDS[:6], 40, 41]
    parts = of([IMAGE], IDS[:6], rows=ROWS[:3])
    contents = Contents(parts.contents, ids)

    assert len(contents) == 8
    assert list(contents) == [*parts.contents, 40, 41]
    assert contents[4:7] == [*parts.contents[4:], 40]
    assert (contents[0], contents[7]) == (5, 41)


@pytest.mark.parametrize(
    ("parts", "rows", "message"),
    [
        ([PromptPart(start=8, count=3, digest="a")], ROWS[:3], "prompt of 10 tokens"),
        ([IMAGE, PromptPart(start=4, count=2, digest="b")], ROWS, "expected it after token 5"),
        ([IMAGE], ROWS, "take 3 rows, but 5 came"),
        ([PromptPart(start=1, count=0, digest="a")], ROWS[:0], "part of 0 tokens"),
    ],
)
def test_parts_that_do_not_fit_are_refused(parts: list[PromptPart], rows: Any, message: str) -> None:
    with pytest.raises(BugError, match=message):
        of(parts, rows=rows)


def test_lacking_rows_and_changed_tokens() -> None:
    parts = of([IMAGE, OTHER])
    handed_over = of([IMAGE, OTHER], rows=None)

    assert not parts.lacks_rows()
    assert (handed_over.lacks_rows(), handed_over.lacks_rows(8), handed_over.lacks_rows(9)) == (
        True,
        True,
        False,
    )
    assert [parts.changes(start, 1) for start in (1, 2, 4, 5, 8, 9, 30)] == [
        *(False, True, True, False, True, False, False)
    ]
    text_in_a_full_part = of([PromptPart(start=0, count=4, full=True)], rows=None)
    assert (text_in_a_full_part.changes(3, 1), text_in_a_full_part.lacks_rows()) == (True, False)
