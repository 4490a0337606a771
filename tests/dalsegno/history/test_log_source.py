"""The log that is read if none is named."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from configs.checks import resolve
from dalsegno.history import log_source
from dalsegno.history.log_source import LogSource
from dalsegno.serve import data_dir
from dalsegno.serve.data_dir import DataDir, DataDirError
from tests.dalsegno.serve.test_data_dir import DEPLOYMENT


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ExitStack]:
    """A folder with the data dirs `a` and `b` of models of those names; those in the set are running."""
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        data = data_dir.of(name)
        data.nats.mkdir(parents=True)
        data.remember(msgspec.structs.replace(resolve("demo"), name=name))
    with ExitStack() as running:
        yield running


def run(name: str, running: ExitStack) -> DataDir:
    data = data_dir.of(name)
    running.enter_context(data.lock())
    data_dir.write_private(data.deployment_file, DEPLOYMENT)
    return data


def test_of_several_data_dirs_the_one_that_runs_is_meant(here: ExitStack) -> None:
    data = run("b", here)

    assert log_source.configs(LogSource()) == data.configs() != {}


def test_where_none_or_several_run_the_person_is_asked_and_told_which_do(here: ExitStack) -> None:
    with pytest.raises(DataDirError, match=r"which log\? .*: \.dalsegno/a, \.dalsegno/b; name one with"):
        log_source.configs(LogSource())

    run("a", here)
    run("b", here)
    with pytest.raises(DataDirError, match=r"\.dalsegno/a \(running\), \.dalsegno/b \(running\); name one"):
        log_source.configs(LogSource())
