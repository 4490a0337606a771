"""The files of the sealing key and of the anchors. They are kept outside of the data dir (ADR 25).

~/.local/state/dalsegno/seal.key     the seed, readable by its user only
~/.local/state/dalsegno/seal.pub     the public key: what a verification has to trust
~/.local/state/dalsegno/anchors/     a file for each log: STREAM-<creation time>.jsonl
"""

import contextlib
import os
from pathlib import Path
from typing import Final

import msgspec

from configs.deployment import ConfigError, SealingSettings
from configs.secrets import secret_in
from shared.sealing import keys
from shared.sealing.keys import KeyTextError, SigningKey

KEY_FILE: Final = "seal.key"
PUBLIC_FILE: Final = "seal.pub"
_ANCHORS: Final = "anchors"
_WHAT: Final = "the seed of a sealing key"


class NoPlaceForKeyError(ConfigError):
    """No key is configured, and none can be made in the default place."""


class SealingKey(msgspec.Struct, frozen=True, kw_only=True):
    """The key of a conductor.

    Attributes:
        source: the file, or the configuration key, that it is from.
        is_new: True if it was made just now.
    """

    key: SigningKey
    source: str
    is_new: bool = False


def state_dir() -> Path:
    """Return the folder of the user's state: `$XDG_STATE_HOME/dalsegno`.

    Raises:
        NoPlaceForKeyError: the user has no home.
    """
    try:
        return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "dalsegno"
    except RuntimeError:
        raise NoPlaceForKeyError("the user has no home folder; set sealing.key_file") from None


def key_file(settings: SealingSettings) -> Path:
    """Return the path of the key file."""
    return Path(settings.key_file) if settings.key_file is not None else state_dir() / KEY_FILE


def anchor_file(settings: SealingSettings, stream: str, created_ns: int) -> Path:
    """Return the path of the anchors of one log."""
    folder = Path(settings.anchor_dir) if settings.anchor_dir is not None else None
    return (folder or key_file(settings).parent / _ANCHORS) / f"{stream}-{created_ns}.jsonl"


def signing_key(settings: SealingSettings) -> SealingKey:
    """Return the key, which is made if its file does not exist.

    Raises:
        NoPlaceForKeyError: no key is configured, and the default file cannot be written.
        ConfigError: a configured key cannot be read, or is not a key.
    """
    if settings.key is not None:
        return SealingKey(key=_signing(settings.key, "sealing.key"), source="sealing.key")
    path = key_file(settings)
    is_new = not path.exists() and _make(path, is_default=settings.key_file is None)
    return SealingKey(
        key=_signing(secret_in(path, "sealing.key_file", _WHAT), f"sealing.key_file: {path}"),
        source=str(path),
        is_new=is_new,
    )


def trusted_keys(settings: SealingSettings) -> frozenset[bytes]:
    """Return the public keys that are trusted here: the configured ones, and that of the key on this machine.

    No key is made.

    Raises:
        ConfigError: a configured key cannot be read, or is not a key.
    """
    found = {keys.raw(text) for text in settings.trusted_keys}
    if settings.key is not None:
        found.add(_signing(settings.key, "sealing.key").public)
        return frozenset(found)
    with contextlib.suppress(NoPlaceForKeyError):
        path = key_file(settings)
        if (public := path.with_suffix(".pub")).exists():
            found.add(public_key_in(public))
        elif os.access(path, os.R_OK):
            found.add(_signing(secret_in(path, "sealing.key_file", _WHAT), str(path)).public)
    return frozenset(found)


def public_key(text: str) -> bytes:
    """Return a public key that a user named: 64 hexadecimal characters, or a file with them.

    Raises:
        ConfigError: it is neither.
    """
    try:
        return keys.raw(text)
    except KeyTextError:
        return public_key_in(Path(text))


def public_key_in(path: Path) -> bytes:
    """Return the public key in a file.

    Raises:
        ConfigError: the file is not readable, or holds no key.
    """
    try:
        return keys.raw(secret_in(path, "the public key", "a public key"))
    except KeyTextError as error:
        raise ConfigError(f"{path}: {error}") from error


def new_key_files() -> dict[str, bytes]:
    """Return the contents of a new key's two files, by name."""
    seed = keys.new_seed()
    return {
        KEY_FILE: f"{seed}\n".encode(),
        PUBLIC_FILE: f"{SigningKey(seed).public.hex()}\n".encode(),
    }


def _signing(text: str, source: str) -> SigningKey:
    try:
        return SigningKey(text)
    except KeyTextError as error:
        raise ConfigError(f"{source}: {error}") from error


def _make(path: Path, *, is_default: bool) -> bool:
    """Make a key; return False if another process has just made one."""
    seed, public = new_key_files().values()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        _write(draft, seed, 0o600)
        try:
            os.link(draft, path)  # all or nothing, and never over another process's key
        except FileExistsError:
            return False
        finally:
            draft.unlink()
        _write(path.with_suffix(".pub"), public, 0o644)
    except OSError as error:
        message = f"cannot make the sealing key {path}: {error.strerror}"
        if is_default:
            raise NoPlaceForKeyError(f"{message}; set sealing.key_file") from error
        raise ConfigError(f"sealing.key_file: {message}") from error
    return True


def _write(path: Path, content: bytes, mode: int) -> None:
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
