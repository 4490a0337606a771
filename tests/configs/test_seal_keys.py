"""The sealing key is made once, outside of the data dir, readable by its user only."""

import stat
from pathlib import Path

import pytest

from configs import seal_keys
from configs.deployment import ConfigError, SealingSettings
from configs.seal_keys import NoPlaceForKeyError
from shared.sealing.keys import SigningKey


@pytest.fixture(autouse=True)
def state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "dalsegno"


def test_a_key_is_made_once(state: Path) -> None:
    first = seal_keys.signing_key(SealingSettings())
    again = seal_keys.signing_key(SealingSettings())
    assert (first.is_new, again.is_new) == (True, False)
    assert first.key.public == again.key.public
    assert stat.S_IMODE((state / "seal.key").stat().st_mode) == 0o600
    assert bytes.fromhex((state / "seal.pub").read_text().strip()) == first.key.public


def test_the_own_key_is_trusted_also_without_its_public_file(state: Path) -> None:
    assert seal_keys.trusted_keys(SealingSettings()) == frozenset()
    made = seal_keys.signing_key(SealingSettings())
    assert seal_keys.trusted_keys(SealingSettings()) == {made.key.public}
    (state / "seal.pub").unlink()
    assert seal_keys.trusted_keys(SealingSettings()) == {made.key.public}


def test_a_key_can_be_given_by_the_environment() -> None:
    settings = SealingSettings(key="11" * 32)
    public = SigningKey("11" * 32).public
    assert seal_keys.signing_key(settings).key.public == public
    assert seal_keys.trusted_keys(settings) == {public}


def test_several_keys_are_trusted() -> None:
    settings = SealingSettings(trusted_keys=["22" * 32], key="11" * 32)
    assert len(seal_keys.trusted_keys(settings)) == 2


def test_without_a_place_for_the_default_key_there_is_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    with pytest.raises(NoPlaceForKeyError, match=r"cannot make the sealing key .*; set sealing\.key_file"):
        seal_keys.signing_key(SealingSettings())


def test_a_configured_key_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.key").write_text("no key")
    with pytest.raises(ConfigError, match="expected a key of 64 hexadecimal characters"):
        seal_keys.signing_key(SealingSettings(key_file=str(tmp_path / "bad.key")))
