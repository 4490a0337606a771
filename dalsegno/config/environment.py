"""Environment variables: the only module that reads or writes them.

DALSEGNO_<KEY>         a key of the configuration: DALSEGNO_GATEWAY_PORT is gateway.port
DALSEGNO_NATS_TOKEN    the token of a NATS server; a variable, because other users can see arguments
DALSEGNO_NATS_PASSWORD the password of a NATS user; DALSEGNO_NATS_SEED the seed of an nkey
DALSEGNO_API_KEY       the API key that `dalsegno ask` sends
HF_HUB_CACHE, HF_HOME  the cache of the Hugging Face tools, by default ~/.cache/huggingface/hub
NO_COLOR               no colours in the terminal, whatever its value (no-color.org)
DALSEGNO_FAULT         a file that makes a role fail at a given point; for tests only (shared.faults)
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dalsegno.config.layers import KEYS, VARIABLE_PREFIX
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
NO_COLOR: Final = "NO_COLOR"
FAULT: Final = "DALSEGNO_FAULT"


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The variables that Dal Segno reads. Empty ones count as not set.

    Attributes:
        settings: variables with our prefix, unparsed, misspelt ones included (`dalsegno.config.layers`).
        api_key: the key of a client.
        hub_cache: the cache of the Hugging Face tools; it may not exist.
        fault: a file with injected faults (`shared.faults`).
    """

    settings: Mapping[str, str]
    api_key: str | None
    colours: bool
    hub_cache: Path
    fault: Path | None


def read() -> Environment:
    """Read the current environment."""
    return Environment(
        settings={
            name: value
            for name, value in os.environ.items()
            if name.startswith(VARIABLE_PREFIX) and name not in {API_KEY, FAULT}
        },
        api_key=os.environ.get(API_KEY) or None,
        colours=not os.environ.get(NO_COLOR),
        hub_cache=_hub_cache(),
        fault=Path(fault) if (fault := os.environ.get(FAULT)) else None,
    )


def _hub_cache() -> Path:
    """Locate the cache as the Hugging Face tools do."""
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get(HUB_HOME) or f"{caches}/huggingface"
    cache = Path(os.environ.get(HUB_CACHE) or f"{home}/hub")
    try:
        return cache.expanduser()
    except RuntimeError:  # the user has no home folder, as in some containers
        return cache


def of(credentials: Credentials) -> dict[str, str]:
    """The variables that pass `credentials` to a child process."""
    variables = {
        NATS_TOKEN: credentials.token,
        NATS_USER: credentials.user,
        NATS_PASSWORD: credentials.password,
        NATS_SEED: credentials.seed,
    }
    return {name: value for name, value in variables.items() if value is not None}


def for_child(*, credentials: Mapping[str, str] | None) -> dict[str, str]:
    """The environment of a child process: our own, with its credentials and unbuffered output.

    OpenMP threads wait passively unless configured otherwise: spinning threads of torch would compete with
    the other roles for the cores (steps were 30 times slower on two busy cores).

    Args:
        credentials: the variables for a private server; None if the child uses our own credentials.
    """
    theirs = NATS_CREDENTIALS if credentials is not None else frozenset()
    inherited = {name: value for name, value in os.environ.items() if name not in theirs}
    return {"OMP_WAIT_POLICY": "PASSIVE"} | inherited | dict(credentials or {}) | {"PYTHONUNBUFFERED": "1"}


def replace(variables: Mapping[str, str]) -> None:
    """Make `variables` the environment of this process, as that of a new program would be."""
    os.environ.clear()
    os.environ.update(variables)
