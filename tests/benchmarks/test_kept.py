"""A benchmark that was stopped goes on where it was."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from benchmarks import beside, speech
from benchmarks.kept import KeptFigures
from benchmarks.report import Figure


def test_figures_are_there_for_the_next_run(tmp_path: Path) -> None:
    file = tmp_path / "kept.jsonl"
    kept = KeptFigures(file)
    kept.keep(Figure("one", 1.5, "tok/s", "1 to 2"))
    kept.keep(Figure("failed", math.nan, "tok/s", "failed: out of memory"))
    kept.keep(Figure("two", 7.0, "tok/s"))
    kept.keep(Figure("two", 8.0, "tok/s"))

    again = KeptFigures(file)

    assert again["one"] == Figure("one", 1.5, "tok/s", "1 to 2")
    assert again["two"].value == 8.0, "of a round that was half written, the second one counts"
    assert "failed" not in again


def test_a_line_that_was_cut_off_is_measured_again(tmp_path: Path) -> None:
    file = tmp_path / "kept.jsonl"
    KeptFigures(file).keep(Figure("one", 1.5, "tok/s"))
    file.write_bytes(file.read_bytes() + b'{"name": "tw')

    kept = KeptFigures(file)
    kept.keep(Figure("two", 2.0, "tok/s"))

    assert [name in KeptFigures(file) for name in ("one", "two")] == [True, True]


def test_another_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("my notes\n")

    with pytest.raises(ValueError, match=r"notes\.txt, line 1: expected a figure, found b'my notes'"):
        KeptFigures(file)
    assert file.read_text() == "my notes\n"


def test_speech_measures_only_missing_numbers_of_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[int] = []

    def compared(_: Path, ranks: Sequence[int], clients: Sequence[int]) -> Iterator[list[Figure]]:
        for count in clients:
            asked.append(count)
            yield [Figure(name, 5.0, "ms") for name in speech._names(ranks, count)]

    monkeypatch.setattr(speech, "_compared", compared)
    monkeypatch.setattr(speech, "MINUTES", 1.0)
    file = tmp_path / "kept.jsonl"

    speech._resume(lambda folder: folder, [1], [1], file)
    speech._resume(lambda folder: folder, [1], [1, 16], file)
    assert asked == [1, 16]
    speech._resume(lambda folder: folder, [1, 2], [1], file)

    assert asked == [1, 16, 1], "of two ranks nothing was measured"
    assert "1 at a time: measured before" in capsys.readouterr().out


def test_beside_computes_its_summary_of_kept_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = KeptFigures()
    monkeypatch.setattr(beside, "ROUNDS", 2)
    for number in range(2):
        for variant, tokens in zip(beside._VARIANTS, (100.0, 80.0, 50.0), strict=True):
            kept.keep(Figure(beside._named(number, variant, "tok/s"), tokens, "tok/s"))
            kept.keep(Figure(beside._named(number, variant, "calls/s"), 3.0, "calls/s"))

    figures = {figure.name: figure.value for figure in beside.measure("cpu", kept)}

    assert figures["decode with a vocoder of lower priority / alone"] == 0.8
    assert figures["decode with a vocoder of the same priority / alone"] == 0.5
