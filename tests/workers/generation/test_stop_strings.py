from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from workers.generation.stop_strings import StopMatcher

STOPS = st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=4)
PIECES = st.lists(st.text("ab\nc", max_size=4), max_size=12)


def oracle(text: str, stops: list[str]) -> tuple[str, bool]:
    """The text up to the earliest stop string, and True if there is one."""
    found = [place for place in (text.find(stop) for stop in stops) if place >= 0]
    return (text[: min(found)], True) if found else (text, False)


def run(pieces: list[str], stops: list[str]) -> tuple[list[str], StopMatcher]:
    matcher = StopMatcher(stops)
    return [*(matcher.push(piece) for piece in pieces), matcher.flush()], matcher


@pytest.mark.slow
@settings(max_examples=1000)
@given(pieces=PIECES, stops=STOPS)
@example(pieces=["abc"], stops=["abcd", "bc"])
@example(pieces=["aab", "aaab"], stops=["aaab"])
@example(pieces=["a", "b", "a", "b", "b"], stops=["ababb", "bab", "ab\n"])
def test_the_text_ends_at_the_earliest_stop_string_however_it_is_cut(
    pieces: list[str], stops: list[str]
) -> None:
    released, matcher = run(pieces, stops)

    assert ("".join(released), matcher.matched) == oracle("".join(pieces), stops)
    assert (matcher.stop is not None) == matcher.matched
    if matcher.stop is not None:
        assert matcher.stop in stops
        assert "".join(pieces).startswith(matcher.stop, len("".join(released)))


@pytest.mark.slow
@settings(max_examples=300)
@given(text=st.text("ab\n", max_size=7), stops=STOPS)
def test_every_way_to_cut_a_text_gives_the_same(text: str, stops: list[str]) -> None:
    for cuts in range(2 ** max(len(text) - 1, 0)):
        places = [0, *(i + 1 for i in range(len(text) - 1) if cuts >> i & 1), len(text)]
        pieces = [text[a:b] for a, b in pairwise(places)]
        released, matcher = run(pieces, stops)
        assert ("".join(released), matcher.matched) == oracle(text, stops)


@pytest.mark.slow
@settings(max_examples=500)
@given(pieces=PIECES, stops=STOPS)
def test_nothing_is_held_back_that_cannot_be_a_stop_string(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    text = released = ""
    for piece in pieces:
        text += piece
        released += matcher.push(piece)
        held = text[len(released) :]
        if not matcher.matched and held:
            assert any(stop.startswith(held) for stop in stops)


def test_a_text_is_undecided_while_something_earlier_may_become_a_stop_string() -> None:
    matcher = StopMatcher(["abcd", "bc"])

    assert (matcher.push("xabc"), matcher.matched) == ("x", False)
    assert (matcher.push("d"), matcher.matched) == ("", True)

    matcher = StopMatcher(["abcd", "bc"])
    assert (matcher.push("xabc"), matcher.matched) == ("x", False)
    assert (matcher.push("x"), matcher.matched) == ("a", True)


def test_after_a_match_nothing_is_released() -> None:
    matcher = StopMatcher(["."])

    assert [matcher.push("a.b"), matcher.push("c"), matcher.flush()] == ["a", "", ""]


def test_a_match_that_was_undecided_counts_at_the_end() -> None:
    matcher = StopMatcher(["abcd", "bc"])

    assert [matcher.push("abc"), matcher.flush(), matcher.matched] == ["", "a", True]


def test_without_stop_strings_everything_passes_at_once() -> None:
    matcher = StopMatcher([])

    assert [matcher.push("abc"), matcher.push(""), matcher.flush(), matcher.matched] == ["abc", "", "", False]


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher([""])
