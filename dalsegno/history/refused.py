"""`dalsegno log --refused`: the requests that gateways refused and did not publish, in counts and samples."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any, Final

import click

from dalsegno.history import log_source
from dalsegno.history.log_source import LogSource
from dalsegno.history.summary import iso
from dalsegno.terminal import tables
from dalsegno.terminal.tables import Cell, Column
from shared.errors import ClientError
from shared.events import MalformedEventError, Refusal, RequestsRefused
from shared.log.port import Log
from shared.subject_rules import read_event
from shared.subjects import Subjects

_COUNTS: Final = (
    Column("REFUSED", 8, is_right=True),
    Column("WITHOUT SAMPLE", 14, is_right=True),
    Column("STATUS", 6),
    Column("CODE", 27),
    Column("TENANT", 12),
)
_SAMPLES: Final = (
    Column("REFUSED", 24),
    Column("REQUEST", 36),
    Column("STATUS", 6),
    Column("CODE", 27),
    Column("TENANT", 12),
    Column("ROUTE", 26),
    Column("MESSAGE"),
)
_Key = tuple[int, str, str | None]


@dataclass(slots=True)
class Refused:
    """The refused requests that a log records.

    Attributes:
        counts: by status, code and tenant: exact.
        sampled: those of them that are among `samples`.
        samples: the gateway's name and the refusal, in order of time.
    """

    counts: Counter[_Key] = field(default_factory=Counter)
    sampled: Counter[_Key] = field(default_factory=Counter)
    samples: list[tuple[str, Refusal]] = field(default_factory=list)
    _ids: set[str] = field(default_factory=set)

    def take(self, event: RequestsRefused) -> None:
        """Add an event; a second copy of one adds nothing."""
        if event.id in self._ids:
            return
        self._ids.add(event.id)
        for one in event.counts:
            self.counts[one.status, one.code, one.tenant] += one.count
        for refusal in event.samples:
            self.sampled[_key(refusal)] += 1
            self.samples.append((event.writer, refusal))

    def newest(self, limit: int, request_id: str | None = None) -> list[tuple[str, Refusal]]:
        """The newest samples first; with `request_id`, those with this id or this `X-Request-ID`."""
        found = [one for one in self.samples if request_id in (None, one[1].request_id, one[1].correlation)]
        return sorted(found, key=lambda one: one[1].time_ns, reverse=True)[:limit]


async def show(source: LogSource, request_id: str | None, limit: int, *, as_json: bool) -> None:
    """Print the newest samples and all counts; with `request_id`, only the samples of that request.

    Raises:
        ClientError: no sample is of this request.
    """
    async with log_source.open_log(source) as (log, subjects):
        refused = await read(log, subjects)
    samples = refused.newest(limit, request_id)
    if request_id is not None and not samples:
        raise ClientError(
            f"no sample is of a refused request {request_id!r}: of {refused.counts.total()} refused requests "
            f"{len(refused.samples)} are samples; `dalsegno log --refused` lists them"
        )
    if as_json:
        for line in _json_lines(refused, samples, with_counts=request_id is None):
            click.echo(json.dumps(line, ensure_ascii=False))
        return
    if not refused.counts:
        click.echo("no refused requests in this log")
        return
    if request_id is None:
        tables.show(_COUNTS, [_count_row(refused, key) for key in _by_count(refused)])
        click.echo()
    tables.show(_SAMPLES, [_sample_row(refusal) for _, refusal in samples])


async def read(log: Log, subjects: Subjects) -> Refused:
    """Read all that the log tells of refused requests."""
    refused = Refused()
    async with aclosing(log.history([subjects.refused("*")])) as records:
        async for record in records:
            with suppress(MalformedEventError):  # not a gateway's
                _, event = read_event(record, subjects)
                if isinstance(event, RequestsRefused):
                    refused.take(event)
    return refused


def _by_count(refused: Refused) -> list[_Key]:
    return [key for key, _ in refused.counts.most_common()]


def _key(refusal: Refusal) -> _Key:
    return refusal.status, refusal.code, refusal.tenant


def _count_row(refused: Refused, key: _Key) -> Sequence[Cell]:
    status, code, tenant = key
    count = refused.counts[key]
    return str(count), str(count - refused.sampled[key]), str(status), code, tenant or "-"


def _sample_row(refusal: Refusal) -> Sequence[Cell]:
    return (
        iso(refusal.time_ns),
        refusal.request_id or refusal.correlation or "-",
        str(refusal.status),
        (refusal.code, "red"),
        refusal.tenant or "-",
        refusal.route or "-",
        refusal.message,
    )


def _json_lines(
    refused: Refused, samples: list[tuple[str, Refusal]], *, with_counts: bool
) -> Iterator[dict[str, Any]]:
    """The counts, then the samples, as JSON values; `kind` tells them apart."""
    for key in _by_count(refused) if with_counts else ():
        status, code, tenant = key
        yield {
            "kind": "count",
            "status": status,
            "code": code,
            "tenant": tenant,
            "count": refused.counts[key],
            "without_sample": refused.counts[key] - refused.sampled[key],
        }
    for gateway, refusal in samples:
        yield {
            "kind": "sample",
            "time": iso(refusal.time_ns),
            "request_id": refusal.request_id,
            "correlation": refusal.correlation,
            "status": refusal.status,
            "code": refusal.code,
            "tenant": refusal.tenant,
            "route": refusal.route,
            "param": refusal.param,
            "message": refusal.message,
            "gateway": gateway,
        }
