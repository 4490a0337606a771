"""Whose a thing is, and what goes with the end of a scope."""

import pytest

from workers.data_plane import scopes
from workers.data_plane.scopes import Scopes


def _filled() -> Scopes[str]:
    found: Scopes[str] = Scopes()
    for item, scope in (
        ("a", "r"),
        ("b", "r/0"),
        ("c", "r/0/1"),
        ("d", "r/0/2"),
        ("e", "r/1/1"),
        ("f", "r2"),
    ):
        assert found.add(item, scope)
    return found


def test_the_end_of_a_scope_ends_all_below_it_and_nothing_beside_it() -> None:
    items = _filled()
    assert sorted(items.end("r/0")) == ["b", "c", "d"]
    assert items.count == 3
    assert sorted(items.end("r")) == ["a", "e"]
    assert items.end("r2") == ["f"]
    assert items.count == 0


def test_a_scope_that_never_was_ends_without_a_word() -> None:
    items = _filled()
    assert items.end("x/y") == []
    assert items.end("r/0/1/7") == []
    assert items.count == 6


def test_a_thing_is_in_one_scope_at_a_time() -> None:
    items = _filled()
    assert items.add("c", "r")
    assert sorted(items.end("r/0")) == ["b", "d"]
    assert "c" in items.end("r")


def test_what_was_taken_out_does_not_come_again_and_leaves_no_empty_scope() -> None:
    items = _filled()
    for item in "abcdef":
        items.discard(item)
        items.discard(item)
    assert items.count == 0
    assert items.end("r") == []
    assert items._root.below == {}


@pytest.mark.parametrize("scope", ["r", "r/0", "r/0/1"])
def test_a_scope_that_has_ended_takes_nothing_more_nor_does_one_below_it(scope: str) -> None:
    items: Scopes[str] = Scopes()
    items.end("r")
    assert not items.add("late", scope)
    assert items.count == 0
    assert items.add("late", "r2")


def test_a_thing_that_may_not_move_stays_where_it_is() -> None:
    items = _filled()
    items.end("r2")
    assert not items.add("a", "r2")
    assert "a" in items.end("r")


def test_a_new_beginning_forgets_what_has_ended() -> None:
    items = _filled()
    items.end("r/0")
    assert sorted(items.clear()) == ["a", "e", "f"]
    assert items.add("b", "r/0")


def test_only_so_many_ended_scopes_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scopes, "REMEMBERED", 3)
    items: Scopes[str] = Scopes()
    for number in range(5):
        items.end(f"r{number}")
    assert [items.has_ended(f"r{number}") for number in range(5)] == [False, False, True, True, True]
