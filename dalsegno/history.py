"""`dalsegno log`: recent requests, or one request's events, as the log has them."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import click
import msgspec

from dalsegno import options, source, story
from dalsegno.plain import plain
from dalsegno.source import Source
from shared.errors import ClientError
from shared.events import (
    AnyEvent,
    MalformedEventError,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestRejected,
    RequestSubmitted,
    decode,
)
from shared.ids import is_token, parse_request_id
from shared.log.port import Log, StoredRecord
from shared.subjects import Subjects


@click.command()
@click.argument("request_id", required=False)
@click.option("--follow", "-f", is_flag=True, help="Go on as events are stored, until interrupted.")
@click.option(
    "--limit", type=click.IntRange(min=1), default=20, show_default=True, help="Newest requests shown."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
@options.of_reader
def log(
    request_id: str | None,
    follow: bool,
    limit: int,
    as_json: bool,
    nats: str | None,
    data_dir: Path | None,
    prefix: str,
) -> None:
    """Show recent requests, or the events of REQUEST_ID: time, who, what, why."""
    told = Source(nats=nats, data_dir=data_dir, prefix=prefix)
    if request_id is None and not follow:
        asyncio.run(_recent(told, limit, as_json=as_json))
    else:
        # Ctrl-C is how following ends; anything else it cuts short.
        with contextlib.suppress(*([KeyboardInterrupt] if follow else [])):
            asyncio.run(_events(told, request_id, follow=follow, as_json=as_json))


# ---- recent requests ---------------------------------------------------------------------------------


@dataclass(slots=True)
class Summary:
    """One request in a line; `end_ns` is None while it runs."""

    request_id: str
    model: str
    start_ns: int
    events: int = 0
    end_ns: int | None = None
    outcome: str = "open"
    tokens: str = ""

    def take(self, event: AnyEvent, time_ns: int) -> None:
        self.events += 1
        match event:
            case RequestFinished():
                self.outcome = "finished: " + ", ".join(event.finish_reasons)
                self.tokens = f"{event.usage.prompt_tokens}+{event.usage.completion_tokens}"
            case RequestFailed():
                self.outcome = f"failed: {event.failure.code}"
            case RequestRejected():
                self.outcome = f"rejected: {event.failure.code}"
            case RequestCancelled():
                self.outcome = "cancelled"
            case _:
                return
        self.end_ns = time_ns


async def _recent(told: Source, limit: int, *, as_json: bool) -> None:
    async with source.open_log(told) as (log_, subjects):
        found = await summaries(log_, subjects)
    for summary in found[-limit:]:
        click.echo(json.dumps(_plain(summary)) if as_json else plain(_line(summary)))
    if not found and not as_json:
        click.echo("no requests in this log yet")


async def summaries(log_: Log, subjects: Subjects) -> list[Summary]:
    """Every request in the log, in order of submission."""
    found: dict[str, Summary] = {}
    async for record in log_.history(subjects.logged()):
        address = subjects.parse(record.subject)
        if address is None or address.request_id is None:
            continue
        try:
            event = decode(record.data, address.kind)
        except MalformedEventError:
            continue
        request_id = str(address.request_id)
        # Under what is no id nothing was ever submitted: the conductor refused it.
        if isinstance(event, RequestSubmitted) and is_token(request_id) and request_id not in found:
            found[request_id] = Summary(request_id, event.model, record.time_ns)
        if request_id in found:
            found[request_id].take(event, record.time_ns)
    return list(found.values())


def _plain(summary: Summary) -> dict[str, object]:
    return {
        "request_id": summary.request_id,
        "model": summary.model,
        "submitted": _iso(summary.start_ns),
        "outcome": summary.outcome,
        "tokens": summary.tokens,
        "seconds": (summary.end_ns - summary.start_ns) / 1e9 if summary.end_ns else None,
        "events": summary.events,
    }


def _line(summary: Summary) -> str:
    took = f"{(summary.end_ns - summary.start_ns) / 1e6:.0f} ms" if summary.end_ns else "…"
    return (
        f"{_iso(summary.start_ns)}  {summary.request_id:<36} {summary.model:<12} {summary.outcome:<22} "
        f"{summary.tokens:>9} tokens  {took:>9}  {summary.events} events"
    )


# ---- one request's events ----------------------------------------------------------------------------


async def _events(told: Source, request_id: str | None, *, follow: bool, as_json: bool) -> None:
    if request_id is not None:
        parse_request_id(request_id)
    async with source.open_log(told) as (log_, subjects):
        state = await log_.state()
        wanted = subjects.all_of(request_id) if request_id else subjects.logged()
        start = max(1, state.first_seq) if request_id else state.last_seq + 1
        records = log_.read(wanted, start) if follow else log_.history(wanted)
        shown = 0
        async with aclosing(records) as reading:
            async for line in _lines(reading, subjects, as_json=as_json):
                click.echo(line)
                shown += 1
    if not shown:
        raise ClientError(
            f"the log holds nothing of request {request_id!r}; `dalsegno log` lists what it has"
        )


async def _lines(
    records: AsyncIterator[StoredRecord], subjects: Subjects, *, as_json: bool
) -> AsyncIterator[str]:
    before: int | None = None
    async for record in records:
        yield _event_json(record, subjects) if as_json else plain(_event_line(record, subjects, before))
        before = record.time_ns


def _event_line(record: StoredRecord, subjects: Subjects, before_ns: int | None) -> str:
    since = f"+{(record.time_ns - before_ns) / 1e6:.1f} ms" if before_ns is not None else ""
    head = f"{_iso(record.time_ns)} {since:>11} {record.seq:>8}  "
    try:
        event = _event_of(record, subjects)
    except MalformedEventError as error:
        return f"{head}{'?':<14} {record.subject:<20} unreadable: {error}"
    return f"{head}{story.who(event):<14} {story.what(event):<18} {story.why(event)}"


def _event_json(record: StoredRecord, subjects: Subjects) -> str:
    head = {"seq": record.seq, "time": _iso(record.time_ns), "subject": record.subject}
    try:
        event = _event_of(record, subjects)
    except MalformedEventError as error:
        return json.dumps(head | {"unreadable": str(error)})
    return json.dumps(head | {"event": msgspec.to_builtins(event)}, ensure_ascii=False)


def _event_of(record: StoredRecord, subjects: Subjects) -> AnyEvent:
    address = subjects.parse(record.subject)
    return decode(record.data, address.kind if address else None)


def _iso(time_ns: int) -> str:
    return (
        datetime.fromtimestamp(time_ns / 1e9, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    )
