"""The environment, read and written in this one module.

DALSEGNO_<KEY>         a key of the configuration: DALSEGNO_GATEWAY_PORT is gateway.port
DALSEGNO_NATS_TOKEN    the token of a NATS server; by environment, as arguments are for all to see
DALSEGNO_API_KEY       what `dalsegno ask` shows to a server that takes no one without
HF_HUB_CACHE, HF_HOME  where the hub's tools put their downloads, else ~/.cache/huggingface/hub
NO_COLOR               no colours in the terminal, whatever its value (no-color.org)
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dalsegno.layers import KEYS, VARIABLE_PREFIX

NATS_TOKEN: Final = KEYS["nats.token"].variable
NATS_TOKEN_FILE: Final = KEYS["nats.token_file"].variable
DATA_DIR: Final = KEYS["data_dir"].variable
API_KEY: Final = "DALSEGNO_API_KEY"
HUB_CACHE: Final = "HF_HUB_CACHE"
HUB_HOME: Final = "HF_HOME"
NO_COLOR: Final = "NO_COLOR"


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What the environment says. An empty variable is a silent one.

    Attributes:
        settings: the variables of the configuration, each as it is; also misspelt ones (`dalsegno.layers`).
        api_key: a client's.
        hub_cache: the folder of the hub's downloads, whether it is there or not.
    """

    settings: Mapping[str, str]
    api_key: str | None
    colours: bool
    hub_cache: Path


def read() -> Environment:
    """The environment as it is now."""
    return Environment(
        settings={
            name: value
            for name, value in os.environ.items()
            if name.startswith(VARIABLE_PREFIX) and name != API_KEY
        },
        api_key=os.environ.get(API_KEY) or None,
        colours=not os.environ.get(NO_COLOR),
        hub_cache=_hub_cache(),
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


def for_child(*, nats_token: str | None) -> dict[str, str]:
    """Our own environment for a role, with its token and with output that is not held back.

    OpenMP's threads wait without spinning, unless they are told otherwise: torch's would fight with the
    other roles over the cores (30 times slower steps on two busy ones).
    """
    theirs = {NATS_TOKEN, NATS_TOKEN_FILE}
    inherited = {name: value for name, value in os.environ.items() if name not in theirs}
    token = {NATS_TOKEN: nats_token} if nats_token else {}
    return {"OMP_WAIT_POLICY": "PASSIVE"} | inherited | token | {"PYTHONUNBUFFERED": "1"}
