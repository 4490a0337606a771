"""`python -m benchmarks`, which is `make bench`: beside others first, and then alone."""

import ast
import sys
from pathlib import Path

import pytest

from benchmarks import __main__ as benchmarks
from benchmarks.peers import checkpoint, session
from benchmarks.peers.environments import Environment, EnvironmentFailedError
from benchmarks.peers.session import Entrant
from benchmarks.report import RATIO, Figure
from tests.benchmarks.peers.test_checkpoint import SMALL

pytestmark = pytest.mark.processes


FAKE = "tests.benchmarks.peers.fake"


class _Nowhere(Environment):
    def make(self, cache: Path) -> Path:
        raise EnvironmentFailedError("`pip install it` ended with 1: no such package")


ABSENT = Entrant(script=FAKE, environment=_Nowhere(name="absent", installs=()))


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setitem(checkpoint.SHAPES, "qwen3-0.6b", SMALL)
    monkeypatch.setattr("benchmarks.peers.bandwidth._BYTES", 1 << 20)
    monkeypatch.setattr(session, "ENTRANTS", {"ours": Entrant(script=FAKE, is_server=True), "absent": ABSENT})
    measured = {name: lambda name=name: [Figure(f"{name} is so", 2.0, RATIO)] for name in ("one", "two")}
    monkeypatch.setattr(benchmarks, "MEASUREMENTS", measured)
    monkeypatch.setattr(benchmarks, "TABLES", {"three": lambda: print("a table")})


def test_each_name_is_a_module_that_measures() -> None:
    folder = Path(benchmarks.__file__).parent
    for function, names in (("measure", benchmarks._NAMES), ("main", ("handoff", "log", "gpu"))):
        for name in names:
            tree = ast.parse((folder / f"{name}.py").read_text())
            assert function in {part.name for part in tree.body if isinstance(part, ast.FunctionDef)}, name


def _told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *names: str) -> str:
    monkeypatch.setattr(sys, "argv", ["benchmarks", *names])
    benchmarks.main()
    return capsys.readouterr().out


def test_without_names_ours_is_beside_others_first_and_then_all_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compared, _, alone = _told(monkeypatch, capsys).partition("\nDal Segno on its own\n")

    assert "FAILED: absent\n  `pip install it` ended with 1" in compared
    assert "32 at a time: between tokens, p99 / p50, ours" in compared.partition("\nratios\n")[2]
    assert "fake qwen3-0.6b" in compared
    assert alone.index("one is so") < alone.index("two is so") < alone.index("three\na table")


def test_where_nobody_can_be_installed_all_are_named_and_the_rest_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(session, "ENTRANTS", {"absent": ABSENT})

    told = _told(monkeypatch, capsys)

    assert told.index("FAILED: absent") < told.index("no peer answered") < told.index("one is so")


def test_with_names_only_those_are_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = _told(monkeypatch, capsys, "two")

    assert "two is so" in told
    assert not any(other in told for other in ("one is so", "a table", "FAILED"))


def test_peers_takes_options_and_measures_nothing_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = _told(monkeypatch, capsys, "peers", "--rounds", "1", "--clients", "1", "--peers", "ours")

    assert "1 rounds, each figure their median" in told
    assert "is so" not in told


def test_peers_beside_other_names_is_refused_with_how_it_is_meant(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        _told(monkeypatch, capsys, "two", "peers")
    assert "unknown ['peers']" in capsys.readouterr().err
