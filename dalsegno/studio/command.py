"""`dalsegno studio`: a web application that shows recorded requests.

It reads the log with the permissions of a reader, and publishes nothing but, with `--allow-ask`, requests. It
is reached from this machine
only, through a link with a token that works once (`dalsegno.studio.access`).
"""

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import click

from dalsegno.config import options
from dalsegno.history import log_source
from dalsegno.history.log_source import LogSource
from dalsegno.history.request_filter import RequestFilter
from dalsegno.replay import recorded_request
from dalsegno.serve.data_dir import DataDirError
from dalsegno.studio.recordings import LogRecording, Recording, Row, Shelf
from dalsegno.studio.study import Study
from shared.errors import ClientError


@click.command()
@click.argument("recordings", metavar="[DATA_DIR | BUNDLE...]", nargs=-1, type=click.Path(path_type=Path))
@click.option(
    "--port", type=click.IntRange(0, 65535), default=0, help="Port on 127.0.0.1. [default: a free one]"
)
@click.option(
    "--host",
    default="127.0.0.1",
    metavar="ADDRESS",
    help="The address to listen on, in a container whose port is published on 127.0.0.1. Browsers reach the "
    "pages as 127.0.0.1 and localhost all the same. [default: 127.0.0.1]",
)
@click.option(
    "--export",
    "file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE.html",
    help="Write the pages with the data inside to one file, and serve nothing.",
)
@click.option(
    "--allow-ask",
    is_flag=True,
    help="Let the pages submit changed versions of recorded requests to the running deployment.",
)
@click.option("--request", "requests", multiple=True, metavar="ID", help="Only these, for --export.")
@options.of_reader
def studio(
    recordings: tuple[Path, ...],
    port: int,
    host: str,
    file: Path | None,
    allow_ask: bool,
    requests: tuple[str, ...],
    nats: str | None,
    data_dir: Path | None,
    prefix: str | None,
) -> None:
    """Show recorded requests in a web browser, on this machine only.

    Reads the log of a running or stopped deployment, and bundles: files of `dalsegno export`, or folders of
    them. Prints a link; it works once, and then prints the next one. Ctrl-C stops it.
    """
    found, bundles = _chosen(recordings, data_dir)
    source = LogSource(nats=nats, data_dir=found, prefix=prefix)
    if requests and file is None:
        raise click.UsageError("--request chooses what --export writes; the pages have all requests")
    if file is not None and allow_ask:
        raise click.UsageError("--allow-ask is for pages that a studio serves; --export writes a file")
    if file is None:
        asyncio.run(_run(source, bundles, port, host, allow_ask=allow_ask))
        return
    if not requests and (source.is_named or not bundles):
        raise click.UsageError("--export of a log needs --request: expected the ids of one or more requests")
    count, document = asyncio.run(_exported(source, bundles, requests, needs_log=source.is_named))
    file.write_text(document, encoding="utf-8")
    click.echo(f"{file}: {count} request{'s' if count != 1 else ''}, {file.stat().st_size:,} bytes")


def _chosen(recordings: Sequence[Path], data_dir: Path | None) -> tuple[Path | None, list[Path]]:
    """Return the data dir and the bundles among what the user named."""
    bundles: list[Path] = []
    for path in recordings:
        if not path.is_dir():
            bundles.append(path)
        elif not (path / "nats").is_dir():
            bundles += recorded_request.in_folder(path)
        elif data_dir is not None:
            raise click.UsageError(f"{path} and {data_dir} are two data dirs: name one of them")
        else:
            data_dir = path
    return data_dir, bundles


async def _run(source: LogSource, bundles: Sequence[Path], port: int, host: str, *, allow_ask: bool) -> None:
    needs_log = source.is_named
    try:
        from dalsegno.studio import server
        from dalsegno.studio.access import Door
        from dalsegno.studio.asking import Asker
        from dalsegno.studio.following import Follower
    except ModuleNotFoundError as error:
        raise ClientError(
            f"the studio needs {error.name}, which is not installed: pip install 'dalsegno[gateway]'"
        ) from error
    async with _opened(source, is_needed=needs_log or not bundles, is_wanted=needs_log) as log:
        shelf = Shelf(log)
        for path in bundles:
            shelf.add_file(path)
        with server.bind(port, host) as bound:
            door = Door(bound.getsockname()[1], used=lambda link: click.echo(f"For another browser: {link}"))
            follower = (
                Follower(log.opened.log, log.opened.subjects) if log is not None and log.is_live else None
            )
            if allow_ask and follower is None:
                raise ClientError("--allow-ask needs a running deployment: no log of one is open here")
            for line in _opening(shelf, door.link()):
                click.echo(line)
            asker = Asker(source) if allow_ask else None
            await server.serve(server.application(shelf, door, follower, asker), bound)


async def _exported(
    source: LogSource, bundles: Sequence[Path], requests: Sequence[str], *, needs_log: bool
) -> tuple[int, str]:
    """Return the number of requests that are exported, and the file's contents."""
    from dalsegno.studio import export

    rows, studies, missing = list[Row](), list[tuple[str, Study]](), set(requests)
    async with _opened(source, is_needed=needs_log or not bundles, is_wanted=True) as log:
        shelf = Shelf(log)
        for path in bundles:
            shelf.add_file(path)
        recordings: list[Recording] = [*([log] if log is not None else []), *shelf.bundles.values()]
        for recording in recordings:
            for row in await recording.rows(RequestFilter(), sys.maxsize):
                request_id = row.summary.request_id
                if not requests or request_id in requests:
                    rows.append(row)
                    studies.append((recording.id, await recording.study(request_id)))
                    missing.discard(request_id)
    if missing:
        raise ClientError(
            f"expected the requests {', '.join(sorted(missing))}, found none; see `dalsegno log`"
        )
    title = ", ".join(dict.fromkeys(row.summary.request_id for row in rows))[:_TITLE_CHARS]
    return len(rows), export.document(rows, studies, title)


_TITLE_CHARS: Final = 80


def _opening(shelf: Shelf, link: str) -> list[str]:
    """What the command says once it serves."""
    shown = [shelf.log.name] if shelf.log is not None else []
    count = len(shelf.bundles)
    shown += [f"{count} bundle{'s' if count != 1 else ''}"] if count else []
    what = " and ".join(shown) or "no recording yet: drop bundles on the page"
    return [f"The studio shows {what}.", f"Open {link}", "Ctrl-C stops it."]


@asynccontextmanager
async def _opened(
    source: LogSource, *, is_needed: bool, is_wanted: bool
) -> AsyncIterator[LogRecording | None]:
    """Open the log, if there is to be one; without any the studio shows bundles only."""
    if not is_needed:
        yield None
        return
    if not is_wanted and _has_none(source):
        yield None
        return
    async with log_source.opened(source, trusts_files=True) as opened:
        data_dir = log_source.data_dir_of(source)
        name = str(data_dir.path) if data_dir is not None else opened.url
        is_live = data_dir is None or data_dir.running() is not None
        yield LogRecording(name=name, opened=opened, configs=log_source.configs(source), is_live=is_live)


def _has_none(source: LogSource) -> bool:
    """Tell whether no data dir is named, in any way, and none is here."""
    try:
        log_source.data_dir_of(source)
    except DataDirError:
        return not any(Path(".dalsegno").glob("*/nats"))
    return False
