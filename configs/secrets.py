"""Secrets of a configuration: API keys, and secrets that are kept in files of their own."""

import logging
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

from configs.deployment import ConfigError, GatewaySettings

_LOGGER: Final = logging.getLogger(__name__)
_NAMED_KEY: Final = re.compile(r"([A-Za-z0-9_.-]{1,64})=(?!=*$)(.+)", re.DOTALL)
"""`name=secret`. Equal signs at the very end belong to the secret: base64 is padded with them."""
_PADDED_CHARS: Final = 16
"""A shorter text that ends in an equal sign is a name without secret, not padded base64."""


class ApiKey(msgspec.Struct, frozen=True, kw_only=True):
    """An accepted API key.

    Attributes:
        name: the holder's name in logs and limits.
        secret: printable ASCII without spaces, because it is sent in a header.
    """

    name: str
    secret: str

    def __repr__(self) -> str:  # keeps the secret out of tracebacks and log lines
        return f"ApiKey(name={self.name!r}, secret='***')"


def api_keys(settings: GatewaySettings) -> tuple[ApiKey, ...]:
    """All accepted API keys: those of the configuration, then those of its file.

    A key without a name is called `key-<position>`. A file that other users can read causes a warning.

    Raises:
        ConfigError: the file cannot be read, a key cannot be sent, or a name or a secret occurs twice. No
            message contains a secret.
    """
    given = [(f"gateway.api_keys[{place}]", text) for place, text in enumerate(settings.api_keys)]
    if settings.api_keys_file is not None:
        given += _lines(Path(settings.api_keys_file))
    return _keys(given)


def split_key(text: str) -> tuple[str, str]:
    """Split `name=secret`; the name is empty for a secret alone."""
    named = _NAMED_KEY.fullmatch(text)
    return (named[1], named[2]) if named else ("", text)


def secret_in(path: Path, key: str, what: str) -> str:
    """Read the one secret in a file.

    Raises:
        ConfigError: the file is not readable, or holds no secret; names the configuration key `key`.
    """
    secret = _text_of(path, key).strip()
    if not secret:
        raise ConfigError(f"{key}: {path} is empty; expected {what}")
    return secret


def _lines(path: Path) -> Iterable[tuple[str, str]]:
    """The non-empty lines of the file of API keys, each with its position."""
    text = _text_of(path, "gateway.api_keys_file")
    if path.stat().st_mode & stat.S_IROTH:
        _LOGGER.warning("%s contains API keys and is readable by all users of this machine: chmod o-r", path)
    lines = [(f"{path}, line {number}", line.strip()) for number, line in enumerate(text.splitlines(), 1)]
    found = [(where, line) for where, line in lines if line and not line.startswith("#")]
    if not found:  # without any key the gateway would accept every client
        raise ConfigError(f"gateway.api_keys_file: {path} holds no key; expected one per line")
    return found


def _text_of(path: Path, key: str) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")  # editors on Windows put a mark before the first line
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
        raise ConfigError(f"{key}: cannot read {path}: {why}") from error


def _keys(given: Iterable[tuple[str, str]]) -> tuple[ApiKey, ...]:
    found: dict[str, ApiKey] = {}
    secrets: dict[str, str] = {}
    for place, (where, text) in enumerate(given, 1):
        name, secret = split_key(text)
        if not name and text.endswith("=") and len(text) < _PADDED_CHARS:
            raise ConfigError(f"{where}: expected a secret after the equal sign, found nothing")
        if not secret or not all("!" <= char <= "~" for char in secret):
            raise ConfigError(
                f"{where}: expected `name=secret` or a secret, of printable ASCII without spaces; "
                "found characters that a client cannot send in a header"
            )
        name = name or f"key-{place}"
        if name in found:
            raise ConfigError(f"{where}: the name {name!r} belongs to another key already")
        if secret in secrets:
            raise ConfigError(f"{where}: the key {name!r} has the secret of {secrets[secret]!r}")
        found[name] = ApiKey(name=name, secret=secret)
        secrets[secret] = name
    return tuple(found.values())
