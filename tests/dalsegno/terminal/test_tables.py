"""Tables: plain and stable through a pipe, fitted to a width, and safe with text that clients wrote."""

import subprocess
import sys

import pytest

from dalsegno.terminal import tables
from dalsegno.terminal.tables import Cell, Column

COLUMNS = (Column("NAME", 8), Column("EVENTS", 6, is_right=True))
HOSTILE = "[red]x[/red]\x1b[31m"


def test_plain_lines_have_one_line_a_row_however_long() -> None:
    found = tables.plain_lines(COLUMNS, [["a", "3"], ["b" * 200, "10"]])
    assert len(found) == 3
    assert tables.plain_lines(COLUMNS, [["a", "3"]]) == ["NAME      EVENTS", "a              3"]


@pytest.mark.parametrize("width", [20, 80])
def test_fitted_lines_lose_no_text_and_keep_the_width(width: int) -> None:
    found = tables.fitted_lines([Column("a"), Column("b")], [["x" * 70, "y"]], width)
    assert max(map(len, found)) <= width
    assert "".join(found).count("x") == 70


@pytest.mark.parametrize("is_coloured", [False, True])
def test_text_of_clients_is_no_markup_and_steers_no_terminal(is_coloured: bool) -> None:
    found = tables.fitted_lines(COLUMNS, [[HOSTILE, "1"]], 80, is_coloured=is_coloured)
    assert r"[red]x[/red]\x1b[31m" in found[1]
    assert r"[red]x[/red]\x1b[31m" in tables.plain_lines(COLUMNS, [[HOSTILE, "1"]])[1]


def test_styles_are_for_terminals_and_no_color_is_heeded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    row: list[Cell] = [("finished", "green"), "1"]
    assert "\x1b[32m" in tables.fitted_lines(COLUMNS, [row], 80, is_coloured=True)[1]
    assert "\x1b" not in "".join(tables.fitted_lines(COLUMNS, [row], 80) + tables.plain_lines(COLUMNS, [row]))
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[32m" not in tables.fitted_lines(COLUMNS, [row], 80, is_coloured=True)[1]


@pytest.mark.processes
def test_a_command_starts_without_rich() -> None:
    script = "import sys, dalsegno.history.command, dalsegno.check.command; print('rich' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
