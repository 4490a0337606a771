"""The progress of an answer on stderr: a bar on a terminal, and a line now and then elsewhere."""

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Final, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

_LINE_S: Final = 5.0
"""The least time between two lines."""


class ProgressReport:
    """Shows the reports of a model: `{"step": 3, "steps": 50, "steps_per_s": 2.1, "remaining_s": 22.4}`.

    A model may report other fields, or only some of these.

    Args:
        console: where to show them; by default stderr.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._shown_s: float | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, report: Mapping[str, Any]) -> None:
        """Show a report."""
        has_steps = isinstance(report.get("step"), int) and isinstance(report.get("steps"), int)
        if has_steps and self._console.is_terminal:
            self._draw(report)
        else:
            self._write(in_words(report))

    def _draw(self, report: Mapping[str, Any]) -> None:
        step, steps = report["step"], report["steps"]
        if self._bar is None:
            self._bar = Progress(
                BarColumn(),
                TextColumn("{task.completed:.0f}/{task.total:.0f} steps{task.fields[pace]}"),
                console=self._console,
            )
            self._task = self._bar.add_task("", total=steps, pace="")
            self._bar.start()
        self._bar.update(self._task, completed=step, total=steps, pace="".join(_pace(report)), refresh=True)

    def _write(self, words: str) -> None:
        now_s = time.monotonic()
        if self._shown_s is None or now_s - self._shown_s >= _LINE_S:
            self._shown_s = now_s
            self._console.print(words, markup=False, highlight=False)


def in_words(report: Mapping[str, Any]) -> str:
    """A report as a line: its steps, their pace and the time that is left, and then all other fields."""
    known = ("step", "steps", "steps_per_s", "remaining_s")
    if "step" not in report or "steps" not in report:
        return ", ".join(f"{name} {value}" for name, value in report.items())
    others = [f", {name} {value}" for name, value in report.items() if name not in known]
    return "".join([f"step {report['step']} of {report['steps']}", *_pace(report), *others])


def _pace(report: Mapping[str, Any]) -> list[str]:
    match report:
        case {"steps_per_s": int() | float() as rate, "remaining_s": int() | float() as left}:
            return [f", {rate:.3g} steps/s", f", {_duration(left)} left"]
        case _:
            return []


def _duration(seconds: float) -> str:
    """A time such as `8 s` or `2:05 min`."""
    whole = round(seconds)
    return f"{whole} s" if whole < 60 else f"{whole // 60}:{whole % 60:02} min"
