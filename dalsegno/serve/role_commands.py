"""The command line and the environment of each role process that the launcher starts."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from configs.deployment import DeploymentConfig
from dalsegno.config import environment
from dalsegno.config.address import Listen
from dalsegno.serve import data_dir
from dalsegno.serve.options import ServeOptions
from dalsegno.serve.role_runs import Command
from shared.log.nats.credentials import Credentials

_TLS: Final = ("ca_file", "cert_file", "key_file")


def commands(
    options: ServeOptions,
    config: DeploymentConfig,
    listens: Sequence[Listen],
    nats_url: str,
    private: Mapping[str, Credentials] | None,
    parts: Path | None = None,
) -> list[Command]:
    """Return the command of each role process, in starting order.

    Roles read the same file and environment as the launcher, and get its flags as arguments; no flag takes a
    secret. Values found by the launcher (a free port, its own server) follow, and take precedence.

    Args:
        options: the launcher's arguments.
        config: the resolved configuration.
        listens: the address of each gateway.
        nats_url: the log's server.
        private: each role's credentials for the launcher's own server; None for another's server, whose
            credentials roles find as the launcher does.
        parts: the folder for the parts of a profile.
    """
    # -P: a folder `shared` or a file `torch.py` in the user's current folder must not be imported.
    python = (sys.executable, "-P", "-m", "dalsegno")
    settings = [part for one in options.settings for part in ("--set", f"{one.key}={one.text}")]
    if private is not None:  # the private server has no TLS, whatever is configured
        settings += [part for key in _TLS if getattr(config.nats, key) for part in ("--set", f"nats.{key}=")]
    log = ("--nats", nats_url, "--prefix", config.nats.prefix)
    profile = ("--profile-parts", str(parts)) if parts is not None else ()
    common = ("--config", options.model, *settings, *log, *profile)
    conductors = _numbered("conductor", config.recovery.conductors)
    conducting = ("conductor", "--data-dir", str(data_dir.of_deployment(config).path))
    own: dict[str, tuple[str, ...]] = {
        **{f"worker-{rank}": ("worker", "--rank", str(rank)) for rank in config.ranks},
        **{
            name: ("gateway", "--host", listen.host, "--port", str(listen.port))
            for name, listen in zip(_numbered("gateway", len(listens)), listens, strict=True)
        },
        **{name: conducting if len(conductors) > 1 else (*conducting, "--alone") for name in conductors},
    }

    def env(name: str) -> dict[str, str]:
        if private is None:
            return environment.for_child(credentials=None)
        shown = private[name if role_of(name) == "worker" else role_of(name)]
        return environment.for_child(credentials=environment.of(shown))

    return [
        Command(name=name, program=python, args=(*args, *common), env=env(name)) for name, args in own.items()
    ]


def _numbered(role: str, count: int) -> list[str]:
    """The names of `count` processes of one role."""
    return [role, *(f"{role}-{number}" for number in range(2, count + 1))]


def role_of(name: str) -> str:
    """The role of a process, from its name."""
    return name.partition("-")[0]
