"""Environment variables: the only module that reads or writes them.

DALSEGNO_<KEY>         a key of the configuration: DALSEGNO_GATEWAY_PORT is gateway.port
DALSEGNO_NATS_TOKEN    the token of a NATS server; a variable, because other users can see arguments
DALSEGNO_NATS_PASSWORD the password of a NATS user; DALSEGNO_NATS_SEED the seed of an nkey
DALSEGNO_API_KEY       the API key that `dalsegno ask` sends
HF_HUB_CACHE, HF_HOME  the cache of the Hugging Face tools, by default ~/.cache/huggingface/hub
HF_ENDPOINT            the hub, by default https://huggingface.co
HF_TOKEN               its token, or else that of `hf auth login` in $HF_TOKEN_PATH or $HF_HOME/token
HF_HUB_OFFLINE         the hub is not asked; TRANSFORMERS_OFFLINE means the same
XDG_CACHE_HOME         the user's caches, by default ~/.cache
NO_COLOR               no colours in the terminal, whatever its value (no-color.org)
DALSEGNO_ENDED         how the processes before a role's ended, from the launcher that restarts it (JSON)
DALSEGNO_FAULT         a file that makes a role fail at a given point; for tests only (shared.faults)
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from configs.deployment import ConfigError
from dalsegno.config.layers import KEYS, VARIABLE_PREFIX
from shared.events import ProcessEnd
from shared.log.nats.credentials import Credentials

NATS_TOKEN: Final = KEYS["nats.token"].variable
NATS_TOKEN_FILE: Final = KEYS["nats.token_file"].variable
NATS_USER: Final = KEYS["nats.user"].variable
NATS_PASSWORD: Final = KEYS["nats.password"].variable
NATS_SEED: Final = KEYS["nats.seed"].variable
NATS_CREDENTIALS_FILE: Final = KEYS["nats.credentials_file"].variable
NATS_CREDENTIALS: Final = frozenset(
    KEYS[f"nats.{key}"].variable
    for key in (
        "token",
        "token_file",
        "user",
        "password",
        "seed",
        "credentials_file",
        "ca_file",
        "cert_file",
        "key_file",
    )
)
"""The variables that identify us to a server, and the server to us."""
DATA_DIR: Final = KEYS["data_dir"].variable
API_KEY: Final = "DALSEGNO_API_KEY"
HUB_CACHE: Final = "HF_HUB_CACHE"
HUB_HOME: Final = "HF_HOME"
HUB_ENDPOINT: Final = "HF_ENDPOINT"
HUB_TOKEN: Final = "HF_TOKEN"  # noqa: S105 - a variable's name
HUB_TOKEN_PATH: Final = "HF_TOKEN_PATH"  # noqa: S105 - a variable's name
HUB_OFFLINE: Final = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
_TRUE: Final = frozenset({"1", "ON", "YES", "TRUE"})
"""As in the Hugging Face tools."""
CACHE_HOME: Final = "XDG_CACHE_HOME"
NO_COLOR: Final = "NO_COLOR"
ENDED: Final = "DALSEGNO_ENDED"
FAULT: Final = "DALSEGNO_FAULT"


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The variables that Dal Segno reads. Empty ones count as not set.

    Attributes:
        settings: variables with our prefix, unparsed, misspelt ones included (`dalsegno.config.layers`).
        api_key: the key of a client.
        cache_home: the folder of the user's caches; it may not exist.
        hub_cache: the cache of the Hugging Face tools; it may not exist.
        hub_endpoint: the address of the hub; None for the public one.
        hub_token: the token for it.
        hub_is_offline: it must not be asked.
        fault: a file with injected faults (`shared.faults`).
    """

    settings: Mapping[str, str]
    api_key: str | None
    colours: bool
    cache_home: Path
    hub_cache: Path
    hub_endpoint: str | None
    hub_token: str | None
    hub_is_offline: bool
    fault: Path | None


def read() -> Environment:
    """Read the current environment."""
    return Environment(
        settings={
            name: value
            for name, value in os.environ.items()
            if name.startswith(VARIABLE_PREFIX) and name not in {API_KEY, ENDED, FAULT}
        },
        api_key=os.environ.get(API_KEY) or None,
        colours=not os.environ.get(NO_COLOR),
        cache_home=_expanded(_cache_home()),
        hub_cache=_hub_cache(),
        hub_endpoint=(os.environ.get(HUB_ENDPOINT) or "").rstrip("/") or None,
        hub_token=_hub_token(),
        hub_is_offline=any(os.environ.get(name, "").upper() in _TRUE for name in HUB_OFFLINE),
        fault=Path(fault) if (fault := os.environ.get(FAULT)) else None,
    )


def _hub_cache() -> Path:
    """Locate the cache as the Hugging Face tools do."""
    return _expanded(os.environ.get(HUB_CACHE) or f"{_hub_home()}/hub")


def _hub_token() -> str | None:
    """Find the token as the Hugging Face tools do: in the variable, or in the file of a login."""
    if token := os.environ.get(HUB_TOKEN, "").strip():
        return token
    try:
        stored = _expanded(os.environ.get(HUB_TOKEN_PATH) or f"{_hub_home()}/token").read_text(
            encoding="utf-8"
        )
    except (OSError, UnicodeDecodeError):  # nobody has logged in
        return None
    return stored.strip() or None


def _hub_home() -> str:
    return os.environ.get(HUB_HOME) or f"{_cache_home()}/huggingface"


def _cache_home() -> str:
    return os.environ.get(CACHE_HOME) or "~/.cache"


def _expanded(path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError:  # the user has no home folder, as in some containers
        return Path(path)


def of(credentials: Credentials) -> dict[str, str]:
    """The variables that pass `credentials` to a child process."""
    variables = {
        NATS_TOKEN: credentials.token,
        NATS_USER: credentials.user,
        NATS_PASSWORD: credentials.password,
        NATS_SEED: credentials.seed,
    }
    return {name: value for name, value in variables.items() if value is not None}


def ended() -> list[ProcessEnd]:
    """The ends of the processes before this one, if a launcher restarted it.

    Raises:
        ConfigError: the variable is set to something else.
    """
    text = os.environ.get(ENDED)
    try:
        return msgspec.json.decode(text, type=list[ProcessEnd]) if text else []
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f"{ENDED}: expected the JSON list that the launcher sets, found something else: {error}; unset it"
        ) from error


def of_ended(ends: Sequence[ProcessEnd]) -> dict[str, str]:
    """The variables that tell a child process how the processes before it ended."""
    return {ENDED: msgspec.json.encode(list(ends)).decode()} if ends else {}


def for_child(*, credentials: Mapping[str, str] | None) -> dict[str, str]:
    """The environment of a child process: our own, with its credentials and unbuffered output.

    OpenMP threads wait passively unless configured otherwise: spinning threads of torch would compete with
    the other roles for the cores (steps were 30 times slower on two busy cores).

    Args:
        credentials: the variables for a private server; None if the child uses our own credentials.
    """
    theirs = {ENDED} | (NATS_CREDENTIALS if credentials is not None else frozenset())
    inherited = {name: value for name, value in os.environ.items() if name not in theirs}
    return {"OMP_WAIT_POLICY": "PASSIVE"} | inherited | dict(credentials or {}) | {"PYTHONUNBUFFERED": "1"}


def replace(variables: Mapping[str, str]) -> None:
    """Make `variables` the environment of this process, as that of a new program would be."""
    os.environ.clear()
    os.environ.update(variables)
