"""`dalsegno init-security`: generates keys for every role, and a NATS server's configuration with them.

    <folder>/nats-server.conf    users and their permissions; one file per server of a cluster
    <folder>/ca.pem              the authority that signed the server's certificate: every role needs it
    <folder>/server.pem          the server's certificate, and server-key.pem its key
    <folder>/keys/<role>.nk      the seed of each role's nkey
    <folder>/seal/seal.key       the key with which the conductor seals the log, and seal.pub its public key

Nothing is overwritten: a new key would lock out the role that has the old one.
"""

import json
import os
import secrets
import shutil
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click

from configs.seal_keys import KEY_FILE, PUBLIC_FILE, new_key_files
from dalsegno.config import options
from dalsegno.security import certificates
from shared.errors import ClientError
from shared.ids import is_token
from shared.log.nats import nkeys
from shared.log.nats.credentials import Credentials
from shared.log.nats.permissions import (
    CLIENT,
    CONDUCTOR,
    GATEWAY,
    PROVISIONER,
    READER,
    authorization,
    named_client,
    worker,
)
from shared.log.nats.private_server import nats_server_binary
from shared.subjects import Subjects

_PORT: Final = 4222
_ROUTES_PORT: Final = 6222
_LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")
_PUBLIC: Final = frozenset({"ca.pem", "server.pem", f"seal/{PUBLIC_FILE}"})


class SecurityError(ClientError):
    """Keys cannot be generated as requested, or would overwrite files."""

    code = "init_security"


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenCertificates:
    """Existing certificates; the paths are absolute.

    Attributes:
        ca: the authority's certificate, unless every machine knows the authority.
    """

    cert: Path
    key: Path
    ca: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SecurityPlan:
    """The files to generate.

    Attributes:
        folder: absolute: the server's configuration names its files by their paths.
        servers: the host name of each server; several are a cluster.
        clients: names of services with their own keys.
    """

    folder: Path
    subjects: Subjects
    ranks: int
    servers: Sequence[str]
    clients: Sequence[str]
    given: GivenCertificates | None


@click.command("init-security")
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False), default=Path("security"))
@click.option(
    "--ranks",
    type=click.IntRange(1, 4096),
    default=1,
    show_default=True,
    help="Number of workers that get a key.",
)
@click.option(
    "--server",
    "servers",
    metavar="HOST",
    multiple=True,
    help="Host name of the NATS server; given three times, a cluster. [default: this machine]",
)
@click.option(
    "--client",
    "clients",
    metavar="NAME",
    multiple=True,
    help="A service that gets its own key to submit requests; all others use `client`.",
)
@click.option(
    "--cert", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="The server's certificate."
)
@click.option(
    "--key", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="The key of --cert."
)
@click.option(
    "--ca",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="The authority that signed --cert, if machines do not know it.",
)
@options.PREFIX
def init_security(
    folder: Path,
    ranks: int,
    servers: Sequence[str],
    clients: Sequence[str],
    cert: Path | None,
    key: Path | None,
    ca: Path | None,
    prefix: str | None,
) -> None:
    """Generate keys for every role, and a NATS server's configuration."""
    if (cert is None) != (key is None) or (ca is not None and cert is None):
        raise click.UsageError("--cert and --key come together, and --ca with them")
    if len(servers) == 2:
        raise click.UsageError("two servers have no majority without each other: name one, or three")
    for name in clients:
        if not is_token(name):
            raise click.BadParameter(f"{name!r}: expected 1 to 64 letters, digits, '_' or '-'")
    given = None
    if cert is not None and key is not None:
        given = GivenCertificates(
            cert=cert.resolve(), key=key.resolve(), ca=ca.resolve() if ca is not None else None
        )
    plan = SecurityPlan(
        folder=folder.expanduser().resolve(),
        subjects=Subjects(prefix or Subjects().prefix),
        ranks=ranks,
        servers=servers or _LOOPBACK[:1],
        clients=clients,
        given=given,
    )
    write(plan.folder, made(plan))
    click.echo(_next(plan, folder))


def made(plan: SecurityPlan) -> dict[str, bytes]:
    """The files' contents, by their names in the folder."""
    roles = {role: Credentials(seed=nkeys.new_seed()) for role in _roles(plan)}
    files = {f"keys/{role}.nk": f"{shown.seed}\n".encode() for role, shown in roles.items()}
    files |= {f"seal/{name}": content for name, content in new_key_files().items()}
    if plan.given is None:
        found = certificates.make(list(dict.fromkeys([*plan.servers, *_LOOPBACK, socket.gethostname()])))
        files |= {"ca.pem": found.authority, "server.pem": found.server, "server-key.pem": found.server_key}
    permissions = authorization(roles, plan.subjects)
    route_secret = secrets.token_urlsafe(32)
    for number in range(len(plan.servers)):
        routes = _routes(plan, number, route_secret) if len(plan.servers) > 1 else ""
        files[_configuration(plan, number)] = _configured(plan, number, permissions, routes).encode()
    return files


def write(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write the files; those that are not public are readable by this user only.

    Raises:
        SecurityError: a file exists already, or cannot be written; if one exists, none is written.
    """
    there = [name for name in files if os.path.lexists(folder / name)]
    if there:
        raise SecurityError(
            f"{folder / there[0]} exists already, and nothing is overwritten: name another folder, or "
            "remove that file"
        )
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, content in files.items():
            path = folder / name
            path.parent.mkdir(mode=0o700, exist_ok=True)
            mode = 0o644 if name in _PUBLIC else 0o600
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
                file.write(content)
    except OSError as error:
        raise SecurityError(f"cannot write {error.filename or folder}: {error.strerror}") from error


def _roles(plan: SecurityPlan) -> list[str]:
    workers, clients = map(worker, range(plan.ranks)), map(named_client, plan.clients)
    return [PROVISIONER, CONDUCTOR, GATEWAY, *workers, READER, CLIENT, *clients]


def _configuration(plan: SecurityPlan, number: int) -> str:
    return "nats-server.conf" if len(plan.servers) == 1 else f"nats-server-{number + 1}.conf"


def _configured(plan: SecurityPlan, number: int, permissions: str, routes: str) -> str:
    name = "dalsegno" if len(plan.servers) == 1 else f"dalsegno-{number + 1}"
    cert, key, _ = _tls(plan)
    return f"""\
# Made by `dalsegno init-security`. It holds public keys; the secret ones are in keys/.

server_name: {_quoted(name)}
listen: "0.0.0.0:{_PORT}"

# The server's monitoring, for this machine only.
http: "127.0.0.1:8222"

# The largest event, and with it the largest request.
max_payload: 8MB
write_deadline: "10s"

tls {{
  cert_file: {_quoted(cert)}
  key_file: {_quoted(key)}
  min_version: "1.2"
}}

# A killed server loses nothing that it has acked. A power failure may lose the last `sync_interval`; with
# `always` it loses nothing, and the server is much slower.
jetstream {{
  store_dir: {_quoted(plan.folder / "log")}
  sync_interval: "10s"
}}
{routes}
# Each role's key and permissions; everything else is denied. A client may publish requests and cancels; a
# reader may publish nothing; no role may use all of JetStream's API.
{permissions}
"""


def _routes(plan: SecurityPlan, number: int, secret: str) -> str:
    cert, key, ca = _tls(plan)
    others = [host for place, host in enumerate(plan.servers) if place != number]
    routes = ", ".join(_quoted(f"nats-route://dalsegno:{secret}@{host}:{_ROUTES_PORT}") for host in others)
    ca_file = f"ca_file: {_quoted(ca)}, " if ca is not None else ""
    return f"""
cluster {{
  name: "dalsegno"
  listen: "0.0.0.0:{_ROUTES_PORT}"
  authorization {{ user: "dalsegno", password: {_quoted(secret)} }}
  routes: [{routes}]
  tls {{ cert_file: {_quoted(cert)}, key_file: {_quoted(key)}, {ca_file}verify: true }}
}}
"""


def _tls(plan: SecurityPlan) -> tuple[Path, Path, Path | None]:
    """The server's paths of certificate, key and authority."""
    if plan.given is not None:
        return plan.given.cert, plan.given.key, plan.given.ca
    return plan.folder / "server.pem", plan.folder / "server-key.pem", plan.folder / "ca.pem"


def _quoted(text: str | Path) -> str:
    return json.dumps(str(text))  # the configuration's strings escape as JSON's do


def _next(plan: SecurityPlan, folder: Path) -> str:
    """The instructions that are printed at the end."""
    program = "nats-server" if shutil.which("nats-server") else nats_server_binary()
    url = ",".join(f"tls://{host}:{_PORT}" for host in plan.servers)
    authority = plan.given.ca if plan.given is not None else folder / "ca.pem"
    lines = [
        f"Made in {folder}: a key for each of {', '.join(_roles(plan))}, and the server's configuration.",
        "",
        "Start the server:" if len(plan.servers) == 1 else "Start each server, on the machine of its name:",
        *(f"  {program} --config {folder / _configuration(plan, n)}" for n in range(len(plan.servers))),
        "",
        "Configure the roles; copy to another machine only the key files of the roles that run there:",
        f"  export DALSEGNO_NATS_URL={url}",
        *([f"  export DALSEGNO_NATS_CA_FILE={authority}"] if authority is not None else []),
        f"  export DALSEGNO_NATS_CREDENTIALS_FILE={folder / 'keys'}",
        "",
        "Seal the log, on the conductors' machines only; `dalsegno verify` needs seal.pub:",
        f"  export DALSEGNO_SEALING_KEY_FILE={folder / 'seal' / KEY_FILE}",
        "",
        "Serve, everything on this machine or role by role:",
        "  dalsegno serve demo",
    ]
    return "\n".join(lines)
