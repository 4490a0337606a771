from pathlib import Path

import pytest

from dalsegno.config import environment
from shared.log.nats.credentials import Credentials


def test_a_silent_environment_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (environment.NO_COLOR, environment.API_KEY):
        monkeypatch.setenv(name, "")
    found = environment.read()
    assert (found.api_key, found.colours) == (None, True)


def test_what_is_set_is_read_and_what_is_not_the_configurations_is_not_taken_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(environment.NATS_TOKEN, "sesame")
    monkeypatch.setenv("DALSEGNO_MISSPELT", "1")
    monkeypatch.setenv(environment.API_KEY, "open")
    monkeypatch.setenv(environment.NO_COLOR, "1")
    found = environment.read()
    assert found.settings == {"DALSEGNO_NATS_TOKEN": "sesame", "DALSEGNO_MISSPELT": "1"}
    assert (found.api_key, found.colours) == ("open", False)


@pytest.mark.parametrize(
    ("said", "cache"),
    [
        ({}, "/home/me/.cache/huggingface/hub"),
        ({"XDG_CACHE_HOME": "/caches"}, "/caches/huggingface/hub"),
        ({"XDG_CACHE_HOME": "/caches", "HF_HOME": "~/hf"}, "/home/me/hf/hub"),
        ({"HF_HOME": "/hf", "HF_HUB_CACHE": "/hub"}, "/hub"),
    ],
)
def test_the_hubs_downloads_are_where_its_own_tools_put_them(
    monkeypatch: pytest.MonkeyPatch, said: dict[str, str], cache: str
) -> None:
    for name in ("XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"HOME": "/home/me"} | said).items():
        monkeypatch.setenv(name, value)

    assert environment.read().hub_cache == Path(cache)


def test_a_child_inherits_all_but_another_servers_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANGUAGE", "it")
    monkeypatch.setenv(environment.NATS_TOKEN, "of somebody else")
    monkeypatch.setenv(environment.NATS_TOKEN_FILE, "/of/somebody/else")
    own = environment.for_child(credentials=environment.of(Credentials(token="ours")))
    assert own[environment.NATS_TOKEN] == "ours"
    assert environment.NATS_TOKEN_FILE not in own
    assert own["LANGUAGE"] == "it"


def test_where_the_server_is_anothers_a_child_is_told_what_we_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.NATS_TOKEN, "of that server")

    assert environment.for_child(credentials=None)[environment.NATS_TOKEN] == "of that server"


def test_a_childs_openmp_threads_wait_without_spinning_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert environment.for_child(credentials=None)["OMP_WAIT_POLICY"] == "PASSIVE"
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert environment.for_child(credentials=None)["OMP_WAIT_POLICY"] == "ACTIVE"


def test_a_file_of_faults_is_no_key_of_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.FAULT, "/tmp/fault")
    found = environment.read()
    assert found.fault == Path("/tmp/fault")
    assert environment.FAULT not in found.settings
    monkeypatch.setenv(environment.FAULT, "")
    assert environment.read().fault is None
