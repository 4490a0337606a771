"""The command line and the environment of each role process that the launcher starts."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from configs.deployment import DeploymentConfig
from dalsegno.config import environment
from dalsegno.config.address import Listen
from dalsegno.serve import data_dir
from dalsegno.serve.options import ServeOptions
from dalsegno.serve.supervisor import Command
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
    """How each role is started, in the order of starting.

    Roles read file and environment as we do, and are told what we were told: by argument, as no flag takes a
    secret. What the launcher found itself (a free port, its own server) stands behind that, and wins.
    `private` is what each role shows to a server of ours; what to show to another's, they are told as we are.
    `parts` is the folder for what they write of a profile.
    """
    # -P: a folder named `shared` or `torch.py` where the user happens to be is not ours.
    python = (sys.executable, "-P", "-m", "dalsegno")
    told = [part for one in options.settings for part in ("--set", f"{one.key}={one.text}")]
    if private is not None:  # it speaks no TLS, whatever is told of another's
        told += [part for key in _TLS if getattr(config.nats, key) for part in ("--set", f"nats.{key}=")]
    log = ("--nats", nats_url, "--prefix", config.nats.prefix)
    profile = ("--profile-parts", str(parts)) if parts is not None else ()
    common = ("--config", options.model, *told, *log, *profile, "--parent", str(os.getpid()))
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

    return [Command(name=name, argv=(*python, *args, *common), env=env(name)) for name, args in own.items()]


def _numbered(role: str, count: int) -> list[str]:
    """The names of so many processes of one role."""
    return [role, *(f"{role}-{number}" for number in range(2, count + 1))]


def role_of(name: str) -> str:
    """The role of a process, by its name."""
    return name.partition("-")[0]
