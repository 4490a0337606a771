"""Arrows end where their boxes are, and nothing is wider than a terminal."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dalsegno.terminal.sequence_diagram import WIDTH, Arrow, Box, draw

LINES = (("prepare", "prepare"), ("LLM", "prefill, decode"))


def boxes(count: int, lines: tuple[tuple[str, str], ...] = LINES) -> list[Box]:
    return [Box(f"rank {place}", f"cuda:{place}", lines) for place in range(count)]


def test_two_boxes_stand_beside_one_another_and_an_arrow_joins_their_middles() -> None:
    assert draw(boxes(2, (("LLM", "decode"),)), [Arrow(0, 1, "token"), Arrow(1, 0, "KV of LLM", "═")]) == [
        "┌─ rank 0 ───────────────────────────┐   ┌─ rank 1 ───────────────────────────┐",
        "│ cuda:0                             │   │ cuda:1                             │",
        "│ LLM  decode                        │   │ LLM  decode                        │",
        "└─────────────────┬──────────────────┘   └─────────────────┬──────────────────┘",
        "                  ├───────────────── token ───────────────►│",
        "                  │◄══════════════ KV of LLM ══════════════┤",
    ]


def test_an_arrow_crosses_the_lifelines_between() -> None:
    *_, above, below = draw(boxes(3), [Arrow(0, 2, "token", "┄"), Arrow(2, 0, "KV", "═")])

    middles = [11, 38, 65]
    assert [above[column] for column in middles] == ["├", "┼", "│"]
    assert [below[column] for column in middles] == ["│", "╪", "┤"]
    assert (above[64], below[12]) == ("►", "◄")


def test_a_label_without_room_is_cut_short() -> None:
    [line] = draw(boxes(4), [Arrow(0, 1, "a name that is much longer than the way")])[-1:]

    assert "a name that is… ►" in line


def test_an_arrow_stays_with_what_it_leads_to() -> None:
    drawn = draw(boxes(2, (("llm", "prefill, decode, score, again ► text"),)), [])

    assert [line[:38].strip(" │") for line in drawn[2:4]] == ["llm  prefill, decode, score, again", "► text"]


def test_more_boxes_than_have_room_stand_below_one_another() -> None:
    lines = draw(boxes(5), [Arrow(0, 4, "token", "┄")])

    assert [line for line in lines if line.startswith("┌")] == [
        f"┌─ rank {place} ─────────────────┐" for place in range(5)
    ]
    assert lines[-1] == "rank 0 ┄┄ token ┄┄► rank 4"


@pytest.mark.slow
@given(
    st.lists(
        st.tuples(st.text("abc_", min_size=1, max_size=20), st.text("abc, ", max_size=90)),
        min_size=1,
        max_size=4,
    ),
    st.integers(1, 6),
    st.data(),
)
def test_nothing_is_wider_than_a_terminal(
    lines: list[tuple[str, str]], count: int, data: st.DataObject
) -> None:
    places = st.integers(0, count - 1)
    arrows = [
        Arrow(source, target, "token")
        for source, target in data.draw(st.lists(st.tuples(places, places), max_size=4))
        if source != target
    ]

    drawn = draw(boxes(count, tuple(lines)), arrows)

    words = max(len(word) for _, remark in lines for word in ["", *remark.split()])
    assert max(map(len, drawn)) <= max(WIDTH, words + 6)
    assert all(name[:10] in "\n".join(drawn) for name, _ in lines)
