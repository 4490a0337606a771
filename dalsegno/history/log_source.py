"""The source of a log: a running deployment, a NATS server, or a data dir at rest.

A data dir at rest is served by a temporary nats-server while it is read; the dir is locked meanwhile, so that
no deployment starts on it. Its log is read once completely, to find records that it lost. A command that uses
an index may leave that out while the files are those that were found whole (`dalsegno.history.whole_files`).
This module writes nothing to the log.
"""

import hashlib
import os
import secrets
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from configs import nats_access
from dalsegno.config import address, environment, resolve
from dalsegno.history.damage import described
from dalsegno.history.store_at_rest import store_at_rest
from dalsegno.history.whole_files import WholeFiles
from dalsegno.serve.data_dir import DataDir, DataDirError
from shared.log.nats.credentials import Credentials
from shared.log.nats.permissions import CLIENT, READER, authorization
from shared.log.nats.store_files import StoreFiles
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
    """An open log, and how its server was reached.

    Attributes:
        index: the folder for an index of its requests; it may be impossible to make or to write.
        is_at_rest: no deployment runs on it.
    """

    log: Log
    subjects: Subjects
    url: str
    credentials: Credentials
    index: Path
    is_at_rest: bool = False


@asynccontextmanager
async def opened(
    source: LogSource, *, alive: bool = False, role: str = READER, trusts_files: bool = False
) -> AsyncGenerator[OpenedLog, None]:
    """Open the log of `source`, as `open_log` does, for those who need its server or its index too.

    With `trusts_files`, a log at rest is not read if it was found whole and its files are unchanged since.
    """
    from shared.log.nats import jetstream

    settings = resolve.reach(resolve.settings_of(nats=source.nats, prefix=source.prefix))
    subjects = Subjects(settings.nats.prefix)
    if settings.nats.url is not None and source.data_dir is None:
        url, credentials = (
            address.nats_url(settings.nats.url),
            nats_access.nats_credentials(settings.nats, role),
        )
        index = _cached_index(f"{url} {subjects.stream}")
    else:
        data_dir = _data_dir(source.data_dir or settings.data_dir)
        running = data_dir.running()
        if running is None and alive:
            raise DataDirError(
                f"no deployment is running on {data_dir.path}: there will be no new events; "
                "leave --follow out to read the stored ones, or start it with `dalsegno serve`"
            )
        if running is None:
            async with _at_rest(data_dir, subjects, trusts_files=trusts_files) as found:
                yield found
            return
        index = data_dir.index if _may_write(data_dir) else _cached_index(str(data_dir.path))
        url, subjects = running.nats_url, Subjects(running.prefix)
        credentials = Credentials(**(running.nats_client if role == CLIENT else running.nats_reader))
    reader = await jetstream.connect(url, credentials=credentials, subjects=subjects, name=role)
    try:
        yield OpenedLog(log=reader, subjects=subjects, url=url, credentials=credentials, index=index)
    finally:
        await reader.close()


def configs(source: LogSource) -> dict[str, Any]:
    """Return the known configurations of the log of `source`, by digest."""
    data_dir = data_dir_of(source)
    return {} if data_dir is None else data_dir.configs()


def data_dir_of(source: LogSource) -> DataDir | None:
    """Return the data dir of the log of `source`; None if it is on a NATS server of the user's own.

    Raises:
        DataDirError: there is no such data dir, or several to choose from.
    """
    settings = resolve.reach(resolve.settings_of(nats=source.nats, prefix=source.prefix))
    if settings.nats.url is not None and source.data_dir is None:
        return None
    return _data_dir(source.data_dir or settings.data_dir)


@asynccontextmanager
async def _at_rest(
    data_dir: DataDir, subjects: Subjects, *, trusts_files: bool
) -> AsyncGenerator[OpenedLog, None]:
    from shared.log.nats import jetstream
    from shared.log.nats.private_server import NatsServer

    with store_at_rest(data_dir, subjects.stream) as (store, files):
        is_own = store == data_dir.nats
        index = data_dir.index if is_own else _cached_index(str(data_dir.path))
        known = WholeFiles(index, subjects.stream)
        are_known = known.are(files)
        if not are_known:
            known.forget()
        reader = Credentials(user=READER, password=secrets.token_urlsafe(32))
        missing: tuple[MissingRecords, ...] = ()
        is_checked = False
        server = NatsServer(store, authorization=authorization({READER: reader}, subjects))
        server.start()
        try:
            log = await jetstream.connect(server.url, credentials=reader, subjects=subjects, name=READER)
            try:
                if not (are_known and trusts_files):
                    missing = await log.find_missing(files)
                    is_checked = True
                if missing:
                    click.echo(f"the log of {data_dir.path} is damaged: {described(missing)}", err=True)
                yield OpenedLog(
                    log=log,
                    subjects=subjects,
                    url=server.url,
                    credentials=reader,
                    index=index,
                    is_at_rest=True,
                )
            finally:
                await log.close()
        finally:
            server.stop()
            if missing and is_own:
                files.restore_index()
            if missing:
                known.forget()
            elif is_checked:
                known.note(StoreFiles(store, subjects.stream) if is_own else files)


def _may_write(data_dir: DataDir) -> bool:
    return os.access(data_dir.index if data_dir.index.exists() else data_dir.path, os.W_OK)


def _cached_index(name: str) -> Path:
    """Return the folder, in the user's cache, of the index of a log that has none beside it."""
    digest = hashlib.sha256(name.encode()).hexdigest()[:24]
    return environment.read().cache_home / "dalsegno" / "index" / digest


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
