"""`dalsegno replay`: decide a request again from its recorded facts, and compare.

The comparing is `conductor.core.replay`'s; here the log is found and read, and the verdict told.
Status 0: all decisions match. 1: one does not, or the log cannot be read. Nothing is ever published.
"""

import asyncio
import json
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import click

from conductor.core.lifecycle import Phase
from conductor.core.replay import Mismatch, Replayer, Verdict, differences
from conductor.digests import core_digest
from dalsegno import garbage, options, source
from dalsegno.plain import plain
from dalsegno.source import Source
from shared.errors import ClientError
from shared.ids import parse_request_id
from shared.models import registry
from shared.models.registry import UnknownFamilyError
from shared.subjects import Subjects


@click.command()
@click.argument("request_id", required=False)
@click.option("--all", "whole", is_flag=True, help="Every request in the log.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per request.")
@options.of_reader
def replay(
    request_id: str | None,
    whole: bool,
    as_json: bool,
    nats: str | None,
    data_dir: Path | None,
    prefix: str,
) -> None:
    """Decide a request again from its recorded facts, and compare.

    REQUEST_ID's facts are fed through the conductor's core; what it decides must be what is recorded.
    """
    if (request_id is None) == (not whole):
        raise click.UsageError("name one REQUEST_ID, or say --all")
    told = Source(nats=nats, data_dir=data_dir, prefix=prefix)
    started = time.perf_counter()
    with garbage.collected_seldom():
        verdicts, events = asyncio.run(_replay(told, request_id))
    if not verdicts and request_id is not None:
        raise ClientError(
            f"the log holds no submission of request {request_id!r}; `dalsegno log` lists what it has"
        )
    for verdict in verdicts.values():
        _tell(verdict, as_json=as_json)
    failed = [verdict for verdict in verdicts.values() if not verdict.matches]
    if not verdicts and not as_json:
        click.echo("no requests in this log yet")
    elif whole and not as_json:
        seconds = time.perf_counter() - started
        click.echo(
            f"{len(verdicts) - len(failed)} of {len(verdicts)} requests match; "
            f"{events} events in {seconds:.2f} s ({events / seconds:,.0f} events/s)"
        )
    sys.exit(1 if failed else 0)


async def _replay(told: Source, request_id: str | None) -> tuple[dict[str, Verdict], int]:
    async with source.open_log(told) as (log, subjects):
        replayer = Replayer(registry.graph, subjects, pins=pins)
        events = 0
        async for record in log.history(_wanted(subjects, request_id)):
            replayer.take(record)
            events += 1
    return replayer.close(), events


def _wanted(subjects: Subjects, request_id: str | None) -> list[str]:
    return subjects.replayed(parse_request_id(request_id)) if request_id is not None else subjects.logged()


@cache
def pins(family: str) -> dict[str, str]:
    """The digests in force here, named as `shared.events.Pins` names them."""
    core = {"core": core_digest()}
    try:
        return core | {"graph": registry.graph(family).digest, "plan": registry.plan_digest(family)}
    except UnknownFamilyError:  # the replay of that request says so; the others are replayed nevertheless
        return core | {"graph": "unknown here", "plan": "unknown here"}


# ---- telling -----------------------------------------------------------------------------------------


def _tell(verdict: Verdict, *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(_plain(verdict), ensure_ascii=False))
        return
    for pin in verdict.pins:
        click.echo(plain(f"{verdict.request_id}: note: digest of {pin}"))
    if verdict.mismatch is None:
        click.echo(plain(f"{verdict.request_id}: {_matching(verdict)}"))
        return
    decisions = "1 decision matches" if verdict.decided == 1 else f"{verdict.decided} decisions match"
    click.echo(plain(f"{verdict.request_id}: {decisions}, then: {verdict.mismatch.what}"))
    for line in _explained(verdict.mismatch):
        click.echo(plain(f"  {line}"))


def _matching(verdict: Verdict) -> str:
    if verdict.phase is Phase.REJECTED:
        return f"rejected, as recorded: {verdict.refusal}"
    if not verdict.adopted and not verdict.decided:
        return f"{verdict.phase}: nothing is decided yet"
    decisions = (
        "the one decision matches" if verdict.decided == 1 else f"all {verdict.decided} decisions match"
    )
    admission = "; the admission was taken as recorded" if verdict.adopted else ""
    return f"{verdict.phase}: {decisions} ({verdict.events} events{admission})"


def _explained(mismatch: Mismatch) -> list[str]:
    lines = [] if mismatch.seq is None else [f"at: record {mismatch.seq}"]
    if mismatch.expected is not None and mismatch.recorded is not None:
        lines += [f"differs: {line}" for line in differences(mismatch.expected, mismatch.recorded)]
    for name, value in (("expected", mismatch.expected), ("recorded", mismatch.recorded)):
        lines.append(f"{name}: {_json(value) if value is not None else 'nothing'}")
    if mismatch.state is not None:
        lines.append(f"state before: {_json(mismatch.state)}")
    return lines


def _plain(verdict: Verdict) -> dict[str, Any]:
    mismatch = verdict.mismatch
    return {
        "request_id": verdict.request_id,
        "matches": verdict.matches,
        "phase": str(verdict.phase),
        "events": verdict.events,
        "refusal": verdict.refusal,
        "decided": verdict.decided,
        "adopted": verdict.adopted,
        "differing_digests": verdict.pins,
        "mismatch": None
        if mismatch is None
        else {
            "seq": mismatch.seq,
            "what": mismatch.what,
            "expected": mismatch.expected,
            "recorded": mismatch.recorded,
            "state_before": mismatch.state,
        },
    }


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
