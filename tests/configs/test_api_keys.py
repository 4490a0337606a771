"""Who may ask: the keys in the configuration and in its file."""

import logging
from pathlib import Path

import pytest

from configs.deployment import ConfigError, GatewaySettings
from configs.secrets import ApiKey, api_keys


def pairs(*told: str, file: Path | None = None) -> list[tuple[str, str]]:
    settings = GatewaySettings(api_keys=list(told), api_keys_file=str(file) if file else None)
    return [(key.name, key.secret) for key in api_keys(settings)]


def write(tmp_path: Path, text: str, mode: int = 0o600) -> Path:
    path = tmp_path / "keys"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_there_are_none_unless_told() -> None:
    assert pairs() == []


def test_a_key_without_a_name_is_called_by_its_place() -> None:
    assert pairs("web=sesame", "open") == [("web", "sesame"), ("key-2", "open")]


def test_signs_of_equality_at_the_end_belong_to_the_secret() -> None:
    assert pairs("c2VzYW1lIG9wZW4hIQ==", "web=b3Blbg==") == [
        ("key-1", "c2VzYW1lIG9wZW4hIQ=="), ("web", "b3Blbg=="),
    ]  # fmt: skip


def test_the_files_keys_come_behind_those_of_the_configuration(tmp_path: Path) -> None:
    file = write(tmp_path, "# who may ask\n\n  web=sesame  \nopen\n")

    assert pairs("first", file=file) == [("key-1", "first"), ("web", "sesame"), ("key-3", "open")]


def test_a_file_may_come_from_windows(tmp_path: Path) -> None:
    file = write(tmp_path, "")
    file.write_bytes(b"\xef\xbb\xbfweb=sesame\r\n\r\nopen\r\n")

    assert pairs(file=file) == [("web", "sesame"), ("key-2", "open")]


@pytest.mark.parametrize("text", ["", "# nobody yet\n\n"])
def test_a_file_without_keys_is_told_and_does_not_let_everybody_in(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="keys holds no key; expected one per line"):
        pairs(file=write(tmp_path, text))


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gateway.api_keys_file: cannot read .*keys: No such file"):
        pairs(file=tmp_path / "keys")


@pytest.mark.parametrize(("mode", "warned"), [(0o600, False), (0o640, False), (0o644, True)])
def test_a_file_that_everybody_can_read_is_worth_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, warned: bool
) -> None:
    with caplog.at_level(logging.WARNING):
        pairs(file=write(tmp_path, "sesame", mode))

    assert ("is readable by all users of this machine" in caplog.text) == warned
    assert "sesame" not in caplog.text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("web=sesame\nweb=other", "line 2: the name 'web' belongs to another key already"),
        ("web=sesame\napp=sesame", "line 2: the key 'app' has the secret of 'web'"),
        ("web=sesame open", "line 1: expected `name=secret` or a secret"),
        ("# a template\nweb=", "line 2: expected a secret after the equal sign, found nothing"),
        ("sésame", "line 1: expected `name=secret` or a secret"),
    ],
)
def test_a_key_that_cannot_be_told_apart_or_sent_is_named_by_its_line(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        pairs(file=write(tmp_path, text))

    assert "sesame" not in raised.value.message


def test_a_keys_secret_is_not_shown_with_it() -> None:
    assert "sesame" not in f"{ApiKey(name='web', secret='sesame')!r} {ApiKey(name='web', secret='sesame')}"
