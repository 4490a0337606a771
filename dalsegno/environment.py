"""The environment, read and written in this one module.

    DALSEGNO_NATS_TOKEN        the token of a NATS server; by environment, as arguments are for all to see
    DALSEGNO_NATS_TOKEN_FILE   a file that holds it, where there is no DALSEGNO_NATS_TOKEN
    DALSEGNO_DATA_DIR          where `serve` keeps its log, unless `--data-dir` says so
    NO_COLOR                   no colours in the terminal, whatever its value (no-color.org)

Everything else is told by options, so that a process list says what runs.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shared.errors import ClientError

NATS_TOKEN: Final = "DALSEGNO_NATS_TOKEN"  # noqa: S105 - the variable's name, not a token
NATS_TOKEN_FILE: Final = "DALSEGNO_NATS_TOKEN_FILE"  # noqa: S105 - again a name
DATA_DIR: Final = "DALSEGNO_DATA_DIR"
NO_COLOR: Final = "NO_COLOR"


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What the environment says; None where it is silent. An empty variable is a silent one."""

    nats_token: str | None
    data_dir: Path | None
    colours: bool


def read() -> Environment:
    """The environment as it is now.

    Raises:
        ClientError: the token's file cannot be read, or holds none.
    """
    data_dir = os.environ.get(DATA_DIR)
    return Environment(
        nats_token=os.environ.get(NATS_TOKEN) or _token_in_file(),
        data_dir=Path(data_dir) if data_dir else None,
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


def _token_in_file() -> str | None:
    path = os.environ.get(NATS_TOKEN_FILE)
    if not path:
        return None
    try:
        token = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ClientError(f"{NATS_TOKEN_FILE}: cannot read {path}: {error}") from error
    if not token:
        raise ClientError(f"{NATS_TOKEN_FILE}: {path} is empty; expected the token of the NATS server")
    return token
