"""The environment, read and written in this one module.

DALSEGNO_<KEY>         a key of the configuration: DALSEGNO_GATEWAY_PORT is gateway.port
DALSEGNO_NATS_TOKEN    the token of a NATS server; by environment, as arguments are for all to see
DALSEGNO_NATS_PASSWORD that of a user of a NATS server, and DALSEGNO_NATS_SEED the seed of an nkey
DALSEGNO_API_KEY       what `dalsegno ask` shows to a server that takes no one without
HF_HUB_CACHE, HF_HOME  where the hub's tools put their downloads, else ~/.cache/huggingface/hub
NO_COLOR               no colours in the terminal, whatever its value (no-color.org)
DALSEGNO_FAULT         a file that orders a role to fail at some point: for tests alone (shared.faults)
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
"""All that says who we are to a server, and which server is the right one."""
DATA_DIR: Final = KEYS["data_dir"].variable
API_KEY: Final = "DALSEGNO_API_KEY"
HUB_CACHE: Final = "HF_HUB_CACHE"
HUB_HOME: Final = "HF_HOME"
NO_COLOR: Final = "NO_COLOR"
FAULT: Final = "DALSEGNO_FAULT"


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What the environment says. An empty variable is a silent one.

    Attributes:
        settings: the variables of the configuration, each as it is; also misspelt ones
        (`dalsegno.config.layers`). api_key: a client's.
        hub_cache: the folder of the hub's downloads, whether it is there or not.
        fault: a file with orders to fail (`shared.faults`).
    """

    settings: Mapping[str, str]
    api_key: str | None
    colours: bool
    hub_cache: Path
    fault: Path | None


def read() -> Environment:
    """The environment as it is now."""
    return Environment(
        settings={
            name: value
            for name, value in os.environ.items()
            if name.startswith(VARIABLE_PREFIX) and name not in {API_KEY, FAULT}
        },
        api_key=os.environ.get(API_KEY) or None,
        colours=not os.environ.get(NO_COLOR),
        hub_cache=_hub_cache(),
        fault=Path(told) if (told := os.environ.get(FAULT)) else None,
    )


def _hub_cache() -> Path:
    """As the hub's own tools find it."""
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get(HUB_HOME) or f"{caches}/huggingface"
    told = Path(os.environ.get(HUB_CACHE) or f"{home}/hub")
    try:
        return told.expanduser()
    except RuntimeError:  # nobody's home is known: a container's user may have none
        return told


def of(credentials: Credentials) -> dict[str, str]:
    """The variables that say `credentials` to a role of ours."""
    told = {
        NATS_TOKEN: credentials.token,
        NATS_USER: credentials.user,
        NATS_PASSWORD: credentials.password,
        NATS_SEED: credentials.seed,
    }
    return {name: value for name, value in told.items() if value is not None}


def for_child(*, credentials: Mapping[str, str] | None) -> dict[str, str]:
    """Our own environment for a role, with its credentials and with output that is not held back.

    OpenMP's threads wait without spinning, unless they are told otherwise: torch's would fight with the
    other roles over the cores (30 times slower steps on two busy ones).

    Args:
        credentials: the variables that say them, for a server of our own; None where a role shows what we
            were told to.
    """
    theirs = NATS_CREDENTIALS if credentials is not None else frozenset()
    inherited = {name: value for name, value in os.environ.items() if name not in theirs}
    return {"OMP_WAIT_POLICY": "PASSIVE"} | inherited | dict(credentials or {}) | {"PYTHONUNBUFFERED": "1"}
