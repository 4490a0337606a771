"""`dalsegno log`: lists recent requests, or one request's events."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import click
import msgspec

from dalsegno.config import options
from dalsegno.history import filter_options, log_source, refused
from dalsegno.history.event_description import summary_of, type_of, writer_of
from dalsegno.history.log_source import LogSource
from dalsegno.history.request_filter import RequestFilter
from dalsegno.history.request_index import opened_requests
from dalsegno.history.request_lives import RequestLives
from dalsegno.history.request_query import newest
from dalsegno.history.summary import COLUMNS, iso
from dalsegno.terminal import tables
from dalsegno.terminal.sanitise import plain
from shared.errors import ClientError
from shared.events import AnyEvent, MalformedEventError, decode
from shared.ids import parse_request_id
from shared.log.port import StoredRecord
from shared.subjects import Subjects


@click.command()
@click.argument("request_id", required=False)
@click.option("--follow", "-f", is_flag=True, help="Follow new events until interrupted.")
@click.option(
    "--limit", type=click.IntRange(min=1), default=20, show_default=True, help="Newest requests shown."
)
@click.option(
    "--refused", "is_refused", is_flag=True, help="Requests that gateways refused: counts, samples."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
@click.option("--no-index", is_flag=True, help="Read the whole log, and keep no index of its requests.")
@filter_options.of_requests
@options.of_reader
def log(
    request_id: str | None,
    follow: bool,
    limit: int,
    is_refused: bool,
    as_json: bool,
    no_index: bool,
    nats: str | None,
    data_dir: Path | None,
    prefix: str | None,
    **choice: Any,
) -> None:
    """Show recent requests, or one request's events.

    Options choose requests: several values of one option are alternatives, different options all apply.
    For each event of REQUEST_ID, and for each end or start of a process that affected it: time, time since
    the previous event, log position, writer, type, description.
    """
    source = LogSource(nats=nats, data_dir=data_dir, prefix=prefix)
    wanted = filter_options.filter_of(**choice)
    if is_refused:
        if follow or wanted.chooses:
            what = "--follow" if follow else "--outcome, --text and the like"
            raise click.UsageError(f"--refused lists what is stored of refusals: leave {what} out")
        asyncio.run(refused.show(source, request_id, limit, as_json=as_json))
        return
    if request_id is None and not follow:
        asyncio.run(_recent(source, wanted, limit, as_json=as_json, is_indexed=not no_index))
        return
    if wanted.chooses:
        what = "REQUEST_ID is one request already" if request_id else "--follow shows the events of all"
        raise click.UsageError(f"--outcome, --text and the like choose requests of the list; {what}")
    asyncio.run(_events(source, request_id, follow=follow, as_json=as_json))


async def _recent(
    source: LogSource, wanted: RequestFilter, limit: int, *, as_json: bool, is_indexed: bool
) -> None:
    async with (
        log_source.opened(source, trusts_files=is_indexed) as opened,
        opened_requests(opened.log, opened.subjects, opened.index if is_indexed else None) as requests,
    ):
        found = await newest(opened.log, opened.subjects, requests, wanted, limit, now_ns=time.time_ns())
        count = len(requests)
    if as_json:
        for summary in found:
            click.echo(json.dumps(summary.plain(), ensure_ascii=False))
    elif found:
        tables.show(COLUMNS, [summary.row() for summary in found])
    elif count:
        click.echo(f"none of the {count:,} requests in this log is such a one")
    else:
        click.echo("no requests in this log yet")


async def _events(source: LogSource, request_id: str | None, *, follow: bool, as_json: bool) -> None:
    if request_id is not None:
        parse_request_id(request_id)
    async with log_source.open_log(source, alive=follow) as (log_, subjects):
        state = await log_.state()
        wanted = subjects.replayed(request_id) if request_id else subjects.logged()
        lives = RequestLives(subjects) if request_id else None
        start = max(1, state.first_seq) if request_id else state.last_seq + 1
        records = log_.read(wanted, start) if follow else log_.history(wanted)
        shown = 0
        async with aclosing(records) as reading:
            async for line in _lines(reading, subjects, lives, as_json=as_json):
                click.echo(line)
                shown += 1
    if not shown:
        raise ClientError(
            f"the log holds nothing of request {request_id!r}; `dalsegno log` lists what it has, and "
            "`dalsegno log --refused` what gateways refused"
        )


async def _lines(
    records: AsyncIterator[StoredRecord],
    subjects: Subjects,
    lives: RequestLives | None = None,
    *,
    as_json: bool,
) -> AsyncIterator[str]:
    before: int | None = None
    async for record in records:
        if lives is not None and not lives.shows(record):
            continue
        yield _event_json(record, subjects) if as_json else plain(_event_line(record, subjects, before))
        before = record.time_ns


def _event_line(record: StoredRecord, subjects: Subjects, before_ns: int | None) -> str:
    since = f"+{(record.time_ns - before_ns) / 1e6:.1f} ms" if before_ns is not None else ""
    head = f"{iso(record.time_ns)} {since:>11} {record.seq:>8}  "
    try:
        event = _event_of(record, subjects)
    except MalformedEventError as error:
        return f"{head}{'?':<14} {record.subject:<20} unreadable: {error}"
    return f"{head}{writer_of(event):<14} {type_of(event):<18} {summary_of(event)}"


def _event_json(record: StoredRecord, subjects: Subjects) -> str:
    head = {"seq": record.seq, "time": iso(record.time_ns), "subject": record.subject}
    try:
        event = _event_of(record, subjects)
    except MalformedEventError as error:
        return json.dumps(head | {"unreadable": str(error)})
    return json.dumps(head | {"event": msgspec.to_builtins(event)}, ensure_ascii=False)


def _event_of(record: StoredRecord, subjects: Subjects) -> AnyEvent:
    address = subjects.parse(record.subject)
    return decode(record.data, address.kind if address else None)
