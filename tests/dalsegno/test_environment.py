from pathlib import Path

import pytest

from dalsegno import environment
from shared.errors import ClientError


def test_a_silent_environment_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        environment.NATS_TOKEN,
        environment.NATS_TOKEN_FILE,
        environment.DATA_DIR,
        environment.NO_COLOR,
    ):
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


def test_the_token_may_be_in_a_file_and_the_variable_itself_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "token"
    file.write_text("sesame\n")
    monkeypatch.setenv(environment.NATS_TOKEN_FILE, str(file))
    monkeypatch.delenv(environment.NATS_TOKEN, raising=False)
    assert environment.read().nats_token == "sesame"

    monkeypatch.setenv(environment.NATS_TOKEN, "simsim")
    assert environment.read().nats_token == "simsim"


@pytest.mark.parametrize(
    ("content", "said"), [(None, "cannot read"), (b"\n", "is empty"), (b"\xff", "cannot read")]
)
def test_a_file_without_a_token_is_told_and_not_taken_for_no_token(
    content: bytes | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "token"
    if content is not None:
        file.write_bytes(content)
    monkeypatch.setenv(environment.NATS_TOKEN_FILE, str(file))
    monkeypatch.delenv(environment.NATS_TOKEN, raising=False)

    with pytest.raises(ClientError, match=f"DALSEGNO_NATS_TOKEN_FILE: .*{said}"):
        environment.read()


def test_a_child_inherits_all_but_another_servers_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANGUAGE", "it")
    monkeypatch.setenv(environment.NATS_TOKEN, "of somebody else")
    monkeypatch.setenv(environment.NATS_TOKEN_FILE, "/of/somebody/else")
    assert environment.for_child(nats_token="ours")[environment.NATS_TOKEN] == "ours"
    without = environment.for_child(nats_token=None)
    assert environment.NATS_TOKEN not in without
    assert environment.NATS_TOKEN_FILE not in without
    assert without["LANGUAGE"] == "it"


def test_a_childs_openmp_threads_wait_without_spinning_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert environment.for_child(nats_token=None)["OMP_WAIT_POLICY"] == "PASSIVE"
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert environment.for_child(nats_token=None)["OMP_WAIT_POLICY"] == "ACTIVE"
