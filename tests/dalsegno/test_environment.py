from pathlib import Path

import pytest

from dalsegno import environment


def test_a_silent_environment_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (environment.NATS_TOKEN, environment.DATA_DIR, environment.NO_COLOR):
        monkeypatch.delenv(name, raising=False)
    found = environment.read()
    assert (found.nats_token, found.data_dir, found.colours) == (None, None, True)


def test_an_empty_variable_is_a_silent_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.NATS_TOKEN, "")
    monkeypatch.setenv(environment.DATA_DIR, "")
    found = environment.read()
    assert (found.nats_token, found.data_dir) == (None, None)


def test_what_is_set_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.NATS_TOKEN, "sesame")
    monkeypatch.setenv(environment.DATA_DIR, "/data")
    monkeypatch.setenv(environment.NO_COLOR, "1")
    found = environment.read()
    assert (found.nats_token, found.data_dir, found.colours) == ("sesame", Path("/data"), False)


def test_a_child_inherits_all_but_another_servers_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANGUAGE", "it")
    monkeypatch.setenv(environment.NATS_TOKEN, "of somebody else")
    assert environment.for_child(nats_token="ours")[environment.NATS_TOKEN] == "ours"
    without = environment.for_child(nats_token=None)
    assert environment.NATS_TOKEN not in without
    assert without["LANGUAGE"] == "it"


def test_a_childs_openmp_threads_wait_without_spinning_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert environment.for_child(nats_token=None)["OMP_WAIT_POLICY"] == "PASSIVE"
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert environment.for_child(nats_token=None)["OMP_WAIT_POLICY"] == "ACTIVE"
