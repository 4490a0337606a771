"""The progress of an answer, on a terminal and elsewhere."""

import io

import pytest
from rich.console import Console

from dalsegno.ask import progress
from dalsegno.ask.progress import ProgressReport, in_words

REPORT = {"step": 12, "steps": 50, "steps_per_s": 2.1234, "remaining_s": 17.9}


def test_a_report_in_words() -> None:
    assert in_words(REPORT) == "step 12 of 50, 2.12 steps/s, 18 s left"
    assert in_words({"step": 1, "steps": 2}) == "step 1 of 2"
    assert in_words(REPORT | {"remaining_s": 125.0, "row": 3}) == (
        "step 12 of 50, 2.12 steps/s, 2:05 min left, row 3"
    )
    assert in_words({"loss": 0.5}) == "loss 0.5"


def test_a_terminal_shows_a_bar_and_a_file_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, file = io.StringIO(), io.StringIO()
    for target, is_terminal in ((terminal, True), (file, False)):
        console = Console(file=target, force_terminal=is_terminal, width=100, color_system=None)
        with ProgressReport(console) as report:
            for step in (10, 11, 12):
                report.say(REPORT | {"step": step})
            monkeypatch.setattr(progress, "_LINE_S", 0.0)
            report.say(REPORT | {"step": 50})

    assert "12/50 steps, 2.12 steps/s, 18 s left" in terminal.getvalue()
    assert "50/50 steps" in terminal.getvalue()
    monkeypatch.undo()
    lines = file.getvalue().splitlines()
    assert lines[0] == "step 10 of 50, 2.12 steps/s, 18 s left"
    assert lines[-1].startswith("step 50 of 50")


def test_a_file_gets_no_line_for_each_step() -> None:
    file = io.StringIO()
    with ProgressReport(Console(file=file, width=100)) as report:
        for step in range(50):
            report.say(REPORT | {"step": step})
    assert file.getvalue() == "step 0 of 50, 2.12 steps/s, 18 s left\n"
