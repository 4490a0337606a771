"""A session of measurements: figures are printed at once, failures are named, and its time is a limit."""

from collections.abc import Iterator

import pytest

from benchmarks.report import Figure
from benchmarks.session import Session


def test_what_fails_is_named_and_the_rest_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    session = Session(minutes=1)

    def fails() -> Iterator[Figure]:
        yield Figure("before it failed", 1.0, "s")
        raise RuntimeError("out of memory")

    session.measure("the first", fails)
    session.measure("the second", lambda: [Figure("after it", 2.0, "s")])

    printed = capsys.readouterr().out
    assert [figure.name for figure in session.figures] == ["before it failed", "after it"]
    assert printed.index("before it failed") < printed.index("FAILED: the first") < printed.index("after it")
    assert "out of memory" in printed


def test_nothing_begins_after_the_time_is_up(capsys: pytest.CaptureFixture[str]) -> None:
    session = Session(minutes=0)
    session.measure("the first", lambda: [Figure("too late", 1.0, "s")])
    assert session.figures == []
    assert "the first: not measured, the time is up" in capsys.readouterr().out
