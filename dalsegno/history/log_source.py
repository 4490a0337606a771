"""The source of a log: a running deployment, a NATS server, or a data dir at rest.

A data dir at rest is served by a temporary nats-server while it is read; the dir is locked meanwhile, so that
no deployment starts on it. Its log is read once completely, to find records that it lost. This module writes
nothing to the log.
"""

import secrets
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from configs import nats_access
from dalsegno.config import address, resolve
from dalsegno.history.damage import described
from dalsegno.history.store_at_rest import store_at_rest
from dalsegno.serve.data_dir import DataDir, DataDirError
from shared.log.nats.credentials import Credentials
from shared.log.nats.permissions import CLIENT, READER, authorization
from shared.log.port import Log, MissingRecords
from shared.subjects import Subjects


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSource:
    """The user's choice of a log: a server or a data dir; else the environment's, else the one found here.

    Attributes:
        prefix: None for the environment's, or `ds`.
    """

    nats: str | None = None
    data_dir: Path | None = None
    prefix: str | None = None

    @property
    def is_named(self) -> bool:
        """True if the user named a log."""
        return self.nats is not None or self.data_dir is not None

    def __post_init__(self) -> None:
        if self.nats is not None and self.data_dir is not None:
            raise click.UsageError("--nats and --data-dir are two different logs: name one of them")


@asynccontextmanager
async def open_log(
    source: LogSource, *, alive: bool = False, role: str = READER
) -> AsyncGenerator[tuple[Log, Subjects], None]:
    """Open the log of `source`; yield it and its subjects.

    Args:
        source: the user's choice.
        alive: accept only a log that a deployment may be writing to.
        role: its permissions: a reader cannot publish, a client can submit requests.

    Raises:
        DataDirError: there is no such data dir, or several to choose from, or no deployment runs on it.
        LogUnavailableError: the server does not answer, or has no such log.
    """
    async with opened(source, alive=alive, role=role) as found:
        yield found.log, found.subjects


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedLog:
    """An open log, and how its server was reached."""

    log: Log
    subjects: Subjects
    url: str
    credentials: Credentials


@asynccontextmanager
async def opened(
    source: LogSource, *, alive: bool = False, role: str = READER
) -> AsyncGenerator[OpenedLog, None]:
    """Open the log of `source`, as `open_log` does, for those who need its server too."""
    from shared.log.nats import jetstream

    settings = resolve.reach(resolve.settings_of(nats=source.nats, prefix=source.prefix))
    subjects = Subjects(settings.nats.prefix)
    if settings.nats.url is not None and source.data_dir is None:
        url, credentials = (
            address.nats_url(settings.nats.url),
            nats_access.nats_credentials(settings.nats, role),
        )
    else:
        data_dir = _data_dir(source.data_dir or settings.data_dir)
        running = data_dir.running()
        if running is None and alive:
            raise DataDirError(
                f"no deployment is running on {data_dir.path}: there will be no new events; "
                "leave --follow out to read the stored ones, or start it with `dalsegno serve`"
            )
        if running is None:
            async with _at_rest(data_dir, subjects) as found:
                yield found
            return
        url, subjects = running.nats_url, Subjects(running.prefix)
        credentials = Credentials(**(running.nats_client if role == CLIENT else running.nats_reader))
    reader = await jetstream.connect(url, credentials=credentials, subjects=subjects, name=role)
    try:
        yield OpenedLog(log=reader, subjects=subjects, url=url, credentials=credentials)
    finally:
        await reader.close()


def configs(source: LogSource) -> dict[str, Any]:
    """Return the known configurations of the log of `source`, by digest."""
    settings = resolve.reach(resolve.settings_of(nats=source.nats, prefix=source.prefix))
    if settings.nats.url is not None and source.data_dir is None:
        return {}
    return _data_dir(source.data_dir or settings.data_dir).configs()


@asynccontextmanager
async def _at_rest(data_dir: DataDir, subjects: Subjects) -> AsyncGenerator[OpenedLog, None]:
    from shared.log.nats import jetstream
    from shared.log.nats.private_server import NatsServer

    with store_at_rest(data_dir, subjects.stream) as (store, files):
        reader = Credentials(user=READER, password=secrets.token_urlsafe(32))
        missing: tuple[MissingRecords, ...] = ()
        server = NatsServer(store, authorization=authorization({READER: reader}, subjects))
        server.start()
        try:
            log = await jetstream.connect(server.url, credentials=reader, subjects=subjects, name=READER)
            try:
                if missing := await log.find_missing(files):
                    click.echo(f"the log of {data_dir.path} is damaged: {described(missing)}", err=True)
                yield OpenedLog(log=log, subjects=subjects, url=server.url, credentials=reader)
            finally:
                await log.close()
        finally:
            server.stop()
            if missing and store == data_dir.nats:
                files.restore_index()


def _data_dir(settings: Path | None) -> DataDir:
    if settings is not None:
        return DataDir(settings.expanduser().resolve())
    here = Path(".dalsegno")
    found = sorted(entry for entry in here.glob("*") if (entry / "nats").is_dir()) if here.is_dir() else []
    running = [path for path in found if DataDir(path).running() is not None] if len(found) > 1 else []
    meant = running if len(running) == 1 else found
    if len(meant) == 1:
        return DataDir(meant[0].resolve())
    names = ", ".join(f"{path} (running)" if path in running else str(path) for path in found) or "none"
    raise DataDirError(
        f"which log? Data dirs in ./.dalsegno: {names}; name one with --data-dir, or use --nats"
    )
