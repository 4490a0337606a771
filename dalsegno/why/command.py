"""`dalsegno why`: one screen that says where a request's time went, and how it ended.

The request is read from a log, or from a bundle. Other requests of the same hour, which it may have waited
for, come from the index of the log; a bundle has none.
"""

import asyncio
import json
import time
from pathlib import Path

import click
import msgspec

from dalsegno.bundle import bundle_file
from dalsegno.config import options
from dalsegno.history import log_source, request_records
from dalsegno.history.log_source import LogSource
from dalsegno.history.request_index import between, opened_requests
from dalsegno.history.summary import Summary
from dalsegno.replay import recorded_request
from dalsegno.replay.recorded_request import History
from dalsegno.replay.verdicts import ControlResult
from dalsegno.terminal import tables
from dalsegno.terminal.sanitise import plain
from dalsegno.why import report
from dalsegno.why.comparison import around, unusual
from dalsegno.why.critical_path import critical_path
from dalsegno.why.report import Explanation
from dalsegno.why.request_facts import RequestFacts
from shared.ids import is_token


@click.command()
@click.argument("what", metavar="REQUEST_ID|BUNDLE")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per part of the request.")
@options.of_reader
def why(what: str, *, as_json: bool, nats: str | None, data_dir: Path | None, prefix: str | None) -> None:
    """Explain where the time of a request went, and how it ended.

    Every moment between its submission and its end belongs to one line: what it computed, or what it waited
    for, and behind whom. A BUNDLE is a file written by `dalsegno export`, or - for stdin.
    """
    source = LogSource(nats=nats, data_dir=data_dir, prefix=prefix)
    is_bundle = (
        what == bundle_file.STDIN or not is_token(what) or (not source.is_named and Path(what).exists())
    )
    if is_bundle:
        found = explanations(recorded_request.of_bundle(what), [], now_ns=0)
    else:
        history, neighbours, is_at_rest = asyncio.run(_of_log(source, what))
        found = explanations(history, neighbours, now_ns=0 if is_at_rest else time.time_ns())
    for number, explanation in enumerate(found):
        if as_json:
            click.echo(json.dumps(report.as_plain(explanation), ensure_ascii=False))
            continue
        if number:
            click.echo()
        _show(explanation)


def explanations(history: History, neighbours: list[Summary], *, now_ns: int) -> list[Explanation]:
    """Explain each part of a request.

    Args:
        history: its records.
        neighbours: other requests of the same hour, and itself; empty if they are not known.
        now_ns: the time until which an open request has been running; 0 for that of its last record.
    """
    decisions = {one.verdict.request_id: one for one in recorded_request.control(history)}
    summaries = {one.request_id: one for one in neighbours}
    return [
        _explained(history, request_id, decisions[request_id], summaries, now_ns)
        for request_id in history.requests
        if request_id in decisions
    ]


def _explained(
    history: History,
    request_id: str,
    decisions: ControlResult,
    summaries: dict[str, Summary],
    now_ns: int,
) -> Explanation:
    facts = RequestFacts.of(history.records, history.subjects, request_id)
    until_ns = facts.end.time_ns if facts.end is not None else max(facts.last_ns, now_ns)
    own = summaries.get(request_id)
    others = [one for one in summaries.values() if one.request_id != request_id]
    return Explanation(
        facts=facts,
        parts=critical_path(facts, others, until_ns),
        unusual=unusual(own, others) if own is not None else [],
        neighbours=others,
        decisions=decisions,
        until_ns=until_ns,
    )


async def _of_log(source: LogSource, request_id: str) -> tuple[History, list[Summary], bool]:
    """Return a request, the others of its hour, and whether its log is at rest."""
    async with log_source.opened(source) as opened:
        found = await request_records.collect(opened.log, opened.subjects, request_id)
        async with opened_requests(opened.log, opened.subjects, opened.index) as requests:
            own = [one for one in requests.newest() if one.request_id == request_id]
            neighbours = between(requests, *around(own[0])) if own else []
    configs = log_source.configs(source)
    history = recorded_request.of_log(msgspec.structs.replace(found, configs=configs))
    return history, neighbours, opened.is_at_rest


def _show(explanation: Explanation) -> None:
    click.echo(plain(report.title(explanation)))
    tables.show(report.COLUMNS, report.rows(explanation))
    for line in report.remarks(explanation):
        click.echo(plain(line))
