"""`dalsegno verify`: compares a log, single requests, or bundles with the log's seals (ADR 25).

Status 0: everything is as it was sealed. 1: something was changed, removed or added. 3: nothing can be said,
because there is no seal, or its key is not trusted.
"""

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import click

from configs import seal_keys
from dalsegno.bundle import bundle_file
from dalsegno.config import options
from dalsegno.history import log_source, request_records, sealed_log, seals
from dalsegno.history.log_source import LogSource
from dalsegno.history.sealed_log import SealedLog
from dalsegno.replay import recorded_request
from dalsegno.replay.recorded_request import History
from dalsegno.terminal.sanitise import plain
from shared.errors import ClientError
from shared.ids import is_token
from shared.sealing.findings import Level, worst
from shared.sealing.keys import fingerprint
from shared.sealing.log_check import LogReport
from shared.sealing.request_check import RequestReport

STATUS: Final = {Level.NOTE: 0, Level.CHANGED: 1, Level.UNPROVEN: 3}
"""The exit status of each result."""


@click.command()
@click.argument("what", metavar="[REQUEST_ID|BUNDLE]...", nargs=-1)
@click.option(
    "--key",
    "key_texts",
    metavar="KEY",
    multiple=True,
    help="A public key to trust, in hex or in a file; may be repeated. [default: that of this machine]",
)
@click.option(
    "--anchor",
    "anchor_files",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    multiple=True,
    help="A file of anchors, in addition to that of this machine.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object per log, request or bundle.")
@options.of_reader
def verify(
    what: Sequence[str],
    key_texts: Sequence[str],
    anchor_files: Sequence[Path],
    as_json: bool,
    nats: str | None,
    data_dir: Path | None,
    prefix: str | None,
) -> None:
    """Verify that a log, or requests, are as they were sealed.

    Without an argument, the whole log is verified. A BUNDLE is a file written by `dalsegno export`, or - for
    stdin. Status 0: intact; 1: tampered; 3: not proven.
    """
    source = LogSource(nats=nats, data_dir=data_dir, prefix=prefix)
    trusted = frozenset(map(seal_keys.public_key, key_texts)) or seals.trusted_keys()
    if not what:
        level = _log(source, trusted, anchor_files, as_json=as_json)
    else:
        level = _requests([_history(one, source) for one in what], trusted, as_json=as_json)
    sys.exit(STATUS[level])


# ---- a whole log -----------------------------------------------------------------------------------------


def _log(source: LogSource, trusted: frozenset[bytes], files: Sequence[Path], *, as_json: bool) -> Level:
    async def verified() -> tuple[LogReport, SealedLog]:
        async with log_source.open_log(source) as (log, subjects):
            return await sealed_log.verified(log, subjects, trusted, files)

    report, begin = asyncio.run(verified())
    level = worst(report.findings)
    if as_json:
        click.echo(json.dumps(sealed_log.as_plain(report, begin), ensure_ascii=False))
        return level
    for line in [*sealed_log.lines(report, begin), _RESULTS[level]]:
        click.echo(plain(line))
    return level


_RESULTS: Final = {
    Level.NOTE: "INTACT: every sealed record is as it was sealed",
    Level.CHANGED: "TAMPERED: the log is not as it was sealed",
    Level.UNPROVEN: "NOT PROVEN: see above",
}


# ---- requests --------------------------------------------------------------------------------------------


def _history(what: str, source: LogSource) -> History:
    if what == bundle_file.STDIN or not is_token(what) or (not source.is_named and Path(what).exists()):
        return recorded_request.of_bundle(what)
    return asyncio.run(_of_log(source, what))


async def _of_log(source: LogSource, request_id: str) -> History:
    async with log_source.open_log(source) as (log, subjects):
        return recorded_request.of_log(await request_records.collect(log, subjects, request_id))


def _requests(histories: Sequence[History], trusted: frozenset[bytes], *, as_json: bool) -> Level:
    found = []
    for history in histories:
        if history.is_redacted:
            raise ClientError(f"{history.source} is redacted: the seals of its log cannot cover it")
        for report in recorded_request.sealed(history, trusted):
            found.append(report.level)
            _show(report, history.source, as_json=as_json)
    return next(level for level in Level if level in found)


def _show(report: RequestReport, source: str | None, *, as_json: bool) -> None:
    if as_json:
        shown = {"request_id": report.request_id, "source": source, **seals.as_plain(report)}
        click.echo(json.dumps(shown, ensure_ascii=False))
        return
    whose = report.request_id if source is None else f"{source}: {report.request_id}"
    said = seals.lines(report)
    if not said:
        keys = ", ".join(map(fingerprint, report.keys))
        said = [f"INTACT: {report.records} records are as they were sealed by key {keys}"]
    for line in said:
        click.echo(plain(f"{whose}: {line}"))
