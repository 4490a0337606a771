"""The environment, read and written in this one module.

DALSEGNO_<KEY>         a key of the configuration: DALSEGNO_GATEWAY_PORT is gateway.port
DALSEGNO_NATS_TOKEN    the token of a NATS server; by environment, as arguments are for all to see
DALSEGNO_API_KEY       what `dalsegno ask` shows to a server that takes no one without
NO_COLOR               no colours in the terminal, whatever its value (no-color.org)
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from dalsegno.layers import KEYS, VARIABLE_PREFIX

NATS_TOKEN: Final = KEYS["nats.token"].variable
NATS_TOKEN_FILE: Final = KEYS["nats.token_file"].variable
DATA_DIR: Final = KEYS["data_dir"].variable
API_KEY: Final = "DALSEGNO_API_KEY"
NO_COLOR: Final = "NO_COLOR"


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What the environment says. An empty variable is a silent one.

    Attributes:
        settings: the variables of the configuration, each as it is; also misspelt ones (`dalsegno.layers`).
        api_key: a client's.
    """

    settings: Mapping[str, str]
    api_key: str | None
    colours: bool


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
    )


def for_child(*, nats_token: str | None) -> dict[str, str]:
    """Our own environment for a role, with its token and with output that is not held back.

    OpenMP's threads wait without spinning, unless they are told otherwise: torch's would fight with the
    other roles over the cores (30 times slower steps on two busy ones).
    """
    theirs = {NATS_TOKEN, NATS_TOKEN_FILE}
    inherited = {name: value for name, value in os.environ.items() if name not in theirs}
    token = {NATS_TOKEN: nats_token} if nats_token else {}
    return {"OMP_WAIT_POLICY": "PASSIVE"} | inherited | token | {"PYTHONUNBUFFERED": "1"}
