"""Where a log is read from: a running deployment, a NATS server, or a data dir at rest.

A data dir at rest is opened by a nats-server of its own, for as long as the reading takes; the dir is
locked meanwhile, so that no deployment starts on it. Nothing here writes to the log.
"""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import click

from dalsegno import address, configuration
from dalsegno.datadir import DataDir, DataDirError
from shared import config
from shared.log.port import Log
from shared.subjects import Subjects


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What the person told: a server, or a data dir; else the environment does, else it is the only one here.

    Attributes:
        prefix: None is the environment's, or `ds`.
    """

    nats: str | None = None
    data_dir: Path | None = None
    prefix: str | None = None

    def __post_init__(self) -> None:
        if self.nats is not None and self.data_dir is not None:
            raise click.UsageError("--nats and --data-dir are two different logs: name one of them")


@asynccontextmanager
async def open_log(source: Source, *, alive: bool = False) -> AsyncGenerator[tuple[Log, Subjects], None]:
    """The log behind `source`, and its subjects; `alive`: only where somebody may be writing to it.

    Raises:
        DataDirError: there is no such data dir, or several to choose from, or nothing runs on it.
        LogUnavailableError: the server does not answer, or has no such log.
    """
    from shared.log import jetstream

    told = configuration.reach(configuration.settings_of(nats=source.nats, prefix=source.prefix))
    subjects = Subjects(told.nats.prefix)
    if told.nats.url is not None and source.data_dir is None:
        url, token = address.nats_url(told.nats.url), config.nats_token(told.nats)
    else:
        data_dir = _data_dir(source.data_dir or told.data_dir)
        running = data_dir.running()
        if running is None and alive:
            raise DataDirError(
                f"no deployment is running on {data_dir.path}: nothing new will come; "
                "leave --follow out to read what there is, or start it with `dalsegno serve`"
            )
        if running is None:
            async with _at_rest(data_dir, subjects) as log:
                yield log, subjects
            return
        url, token, subjects = running.nats_url, running.nats_token, Subjects(running.prefix)
    reader = await jetstream.connect(url, token=token, subjects=subjects, name="reader")
    try:
        yield reader, subjects
    finally:
        await reader.close()


@asynccontextmanager
async def _at_rest(data_dir: DataDir, subjects: Subjects) -> AsyncGenerator[Log, None]:
    from shared.log import jetstream
    from shared.log.server import NatsServer

    if not data_dir.nats.is_dir():
        raise DataDirError(f"{data_dir.path} holds no log: expected a folder {data_dir.nats}")
    with data_dir.lock():
        server = NatsServer(data_dir.nats)
        server.start()
        try:
            log = await jetstream.connect(server.url, token=server.token, subjects=subjects, name="reader")
            try:
                yield log
            finally:
                await log.close()
        finally:
            server.stop()


def _data_dir(told: Path | None) -> DataDir:
    if told is not None:
        return DataDir(told.expanduser().resolve())
    here = Path(".dalsegno")
    found = sorted(entry for entry in here.glob("*") if (entry / "nats").is_dir()) if here.is_dir() else []
    if len(found) == 1:
        return DataDir(found[0].resolve())
    names = ", ".join(map(str, found)) or "none"
    raise DataDirError(
        f"which log? Data dirs in ./.dalsegno: {names}; name one with --data-dir, or use --nats"
    )
