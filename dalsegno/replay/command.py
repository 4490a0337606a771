"""`dalsegno replay`: inspects and verifies a recorded request.

The request is read from a log, or from bundles (`dalsegno.bundle.bundle_file`), which need no server and no
model. There are three levels, and each output names its own:

    control    the decisions, from the recorded facts                    (the default)
    data       the nodes, from their recorded inputs                     --execute
    load       the same arrivals and sizes, on another deployment        --load

Status 0: everything is as recorded. Status 1: something differs, or cannot be replayed. A replay publishes
nothing; `--fork-at` and `--load` submit new requests to a running deployment and leave the old ones
untouched.
"""

import asyncio
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from conductor.core.replay import Replayer
from dalsegno.bundle import bundle_file
from dalsegno.config import options
from dalsegno.history import log_source, request_records, sealed_log, seals
from dalsegno.history.damage import Damage
from dalsegno.history.log_source import LogSource
from dalsegno.replay import inspection, recorded_request, verdicts
from dalsegno.replay.recorded_request import History
from dalsegno.replay.verdicts import ControlResult
from dalsegno.roles import gc_tuning
from dalsegno.terminal.sanitise import plain
from dalsegno.traces import formats, trace_options
from models import registry
from shared.errors import ClientError
from shared.ids import is_token
from shared.sealing.findings import Level, worst
from shared.sealing.log_check import LogReport

if TYPE_CHECKING:
    from dalsegno.replay.load_replay import Arrivals


_OF_ONE: Final = ("state", "diff", "step", "fork_at", "execute")
"""Options for a single request; only one of them may be given."""


@click.command()
@click.argument("what", metavar="[REQUEST_ID|BUNDLE|FOLDER|TRACE]", required=False)
@click.option("--all", "whole", is_flag=True, help="Every request in the log.")
@click.option("--last", type=click.IntRange(min=1), help="With --all: show only the newest ones.")
@click.option("--until", metavar="WHERE", help="Stop after a log position, an event id or type.")
@click.option("--state", metavar="WHERE", help="Show the state after that record.")
@click.option("--diff", nargs=2, metavar="FROM TO", help="Show the changes of the state between two records.")
@click.option("--step", is_flag=True, help="Step through the records by commands (`help` lists them).")
@click.option("--execute", is_flag=True, help="Run the nodes again here, and compare their outputs.")
@click.option(
    "--config",
    "model",
    metavar="MODEL",
    help="With --execute: a name, YAML file or checkpoint. [default: the recorded one, if it is known]",
)
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0),
    help="With --execute: allowed difference of logprobs, and of samples by full scale. [default: exact]",
)
@click.option(
    "--load",
    "target",
    metavar="DATA_DIR|nats://...",
    help="Submit all of it again to the deployment that runs there, as it arrived, and compare times.",
)
@click.option(
    "--speed",
    type=click.FloatRange(min=0, min_open=True),
    help="With --load: speed factor. [default: 1]",
)
@trace_options.of_trace
@click.option("--fork-at", metavar="WHERE", help="Submit a new request that is the same up to there.")
@click.option(
    "--set",
    "changes",
    metavar="KEY=VALUE",
    multiple=True,
    help="With --fork-at: a change, e.g. temperature=0.7; may be repeated.",
)
@click.option("--id", "new_id", metavar="ID", help="With --fork-at: the new request id. [default: generated]")
@click.option("--wait", is_flag=True, help="With --fork-at: show the answer and its differences.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per request, or per answer.")
@options.of_reader
def replay(what: str | None, **flags: Any) -> None:
    """Decide a request again from its recorded facts, and compare.

    Its facts are fed through the conductor's core, whose decisions must equal the recorded ones. A BUNDLE is
    a file written by `dalsegno export`, or - for stdin; of a FOLDER, all bundles are replayed. A TRACE has
    times and lengths only, and goes with --load.
    """
    arguments = ReplayArguments(what, flags)
    with gc_tuning.collected_seldom():
        sys.exit(arguments.run())


class ReplayArguments:
    """The command's arguments, validated together.

    Raises:
        click.UsageError: they contradict each other.
    """

    def __init__(self, what: str | None, flags: dict[str, Any]) -> None:
        self.what = what
        self.flags = flags
        self.as_json: bool = flags["as_json"]
        self.where = LogSource(nats=flags["nats"], data_dir=flags["data_dir"], prefix=flags["prefix"])
        self._check()

    def _check(self) -> None:
        flags = self.flags
        if (self.what is None) == (not flags["whole"]):
            raise click.UsageError("name one REQUEST_ID, BUNDLE, FOLDER or TRACE, or say --all")
        _needs(flags, "last", "whole", "--all")
        for name in ("changes", "new_id", "wait"):
            _needs(flags, name, "fork_at", "--fork-at")
        for name in ("model", "tolerance"):
            _needs(flags, name, "execute", "--execute")
        for name in ("speed", "form", "rate"):
            _needs(flags, name, "target", "--load")
        looks = [name for name in (*_OF_ONE, "target") if flags[name]]
        if len(looks) > 1:
            raise click.UsageError(f"{' and '.join(map(_flag, looks))}: name one of them")
        if flags["until"] and looks and looks != ["step"]:
            raise click.UsageError("--until goes with --step, or stands alone")
        if self.what is None and (flags["until"] or looks not in ([], ["target"])):
            raise click.UsageError(f"{_flag((looks or ['until'])[0])} is for one request: name it")
        if flags["step"] and self.what == bundle_file.STDIN:
            raise click.UsageError(
                "--step reads its commands from stdin: the bundle cannot come from there too"
            )

    def run(self) -> int:
        """Run the replay; return the exit status."""
        flags, as_json = self.flags, self.as_json
        if flags["target"]:
            return _load(self)
        if self.what is None:
            return _all(self.where, flags["last"], as_json=as_json)
        is_look = any(flags[name] for name in ("until", *_OF_ONE))
        if not is_look and not self.where.is_named and Path(self.what).is_dir():
            return _folder(Path(self.what), as_json=as_json)
        history = _history(self.what, self.where, with_media=flags["execute"])
        if history.damaged and (flags["fork_at"] or flags["execute"]):
            raise ClientError(f"{history.requests[0]}: {next(iter(history.damaged.values()))}")
        if flags["fork_at"]:
            return _fork(history, self)
        if flags["execute"]:
            return _execute(history, self)
        if flags["step"]:
            return inspection.step(history, flags["until"], as_json=as_json)
        if flags["until"]:
            return inspection.until(history, flags["until"], as_json=as_json)
        if flags["state"]:
            return inspection.state(history, flags["state"], as_json=as_json)
        if flags["diff"]:
            return inspection.difference(history, *flags["diff"], as_json=as_json)
        return _one(history, as_json=as_json)


def _needs(flags: dict[str, Any], name: str, other: str, flag: str) -> None:
    if flags[name] not in (None, (), False) and not flags[other]:
        raise click.UsageError(f"{_flag(name)} goes with {flag}")


def _flag(name: str) -> str:
    spelt = {"changes": "set", "new_id": "id", "model": "config", "target": "load", "form": "format"}.get(
        name, name
    )
    return f"--{spelt.replace('_', '-')}"


def _history(what: str, where: LogSource, *, with_media: bool = False) -> History:
    """Read a bundle if there is a file of that name or it cannot be a request id; else the log's request."""
    if what == bundle_file.STDIN or not is_token(what) or (not where.is_named and Path(what).exists()):
        return recorded_request.of_bundle(what)
    return asyncio.run(recorded_request.read(where, what, with_media=with_media))


# ---- the control level -----------------------------------------------------------------------------------


def _one(history: History, *, as_json: bool) -> int:
    results = recorded_request.control(history)
    if not as_json:
        _show_weights(results)
    for outcome in results:
        verdicts.print_result(outcome, as_json=as_json)
    return _status(results)


def _show_weights(results: list[ControlResult]) -> None:
    for line in verdicts.weights_of(results):
        click.echo(plain(line))


def _folder(folder: Path, *, as_json: bool) -> int:
    started = time.perf_counter()
    results: list[ControlResult] = []
    unreadable = events = 0
    for path in recorded_request.in_folder(folder):
        try:
            history = recorded_request.of_bundle(str(path))
        except bundle_file.BundleError as error:
            unreadable += 1
            _show_unreadable(path, error, as_json=as_json)
            continue
        found = recorded_request.control(history)
        for outcome in found:
            verdicts.print_result(outcome, as_json=as_json)
        results += found
        events += len(history.records)
    _summarise(results, events, time.perf_counter() - started, as_json=as_json, unreadable=unreadable)
    return 1 if unreadable else _status(results)


def _show_unreadable(path: Path, error: bundle_file.BundleError, *, as_json: bool) -> None:
    flags = {"level": "control", "source": str(path), "matches": False, "error": error.message}
    inspection.show(([error.message], flags), as_json=as_json)


def _all(where: LogSource, last: int | None, *, as_json: bool) -> int:
    started = time.perf_counter()
    results, events, is_damaged = asyncio.run(_replay_all(where, last))
    for outcome in results:
        verdicts.print_result(outcome, as_json=as_json)
    _summarise(results, events, time.perf_counter() - started, as_json=as_json)
    return 1 if is_damaged else _status(results)


async def _replay_all(where: LogSource, last: int | None) -> tuple[list[ControlResult], int, bool]:
    """Return the results, the number of events, and whether records are missing or are not as sealed."""
    async with log_source.open_log(where) as (log, subjects):
        damage = Damage((await log.state()).missing, subjects)
        sealed = await sealed_log.begun(log, subjects, seals.trusted_keys())
        replayer = Replayer(registry.graph, subjects, pins=verdicts.pins)
        events = 0
        async for record in log.history(subjects.logged()):
            replayer.replay_record(record)
            damage.take(record)
            sealed.check.take(record)
            events += 1
        found = list(replayer.close().values())
        results = [ControlResult(verdict=verdict) for verdict in (found[-last:] if last else found)]
        damaged = damage.of(outcome.verdict.request_id for outcome in results)
        for outcome in results:
            request_id = outcome.verdict.request_id
            outcome.cannot = damaged.get(request_id)
            # Read again only for requests that differ: few, unless the version does not fit at all.
            if not outcome.matches and outcome.cannot is None and is_token(request_id):
                one = await request_records.collect(log, subjects, request_id)
                outcome.cannot = verdicts.why_not(one.records, subjects, request_id)
    is_tampered = _show_tampering(sealed.check.report())
    return results, events, is_tampered or bool(damage.missing)


def _show_tampering(report: LogReport) -> bool:
    """Say on stderr what the seals of the log say; return whether it was tampered with."""
    for finding in report.findings:
        if finding.level is not Level.NOTE:
            click.echo(plain(f"log: {sealed_log.line_of(finding)}"), err=True)
    return worst(report.findings) is Level.CHANGED


def _summarise(
    results: list[ControlResult], events: int, seconds: float, *, as_json: bool, unreadable: int = 0
) -> None:
    if as_json:
        return
    if not results and not unreadable:
        click.echo("no requests in this log yet")
        return
    files = f"; {unreadable} {'file' if unreadable == 1 else 'files'} cannot be read" if unreadable else ""
    took = f"{events} events in {seconds:.2f} s ({events / seconds:,.0f} events/s)"
    _show_weights(results)
    click.echo(f"{verdicts.summary(results)}{files}; {took}")


def _status(results: list[ControlResult]) -> int:
    return 0 if all(outcome.matches for outcome in results) else 1


# ---- forks ------------------------------------------------------------------------------------------------


def _fork(history: History, arguments: ReplayArguments) -> int:
    from dalsegno.replay import fork

    flags = arguments.flags
    original, seq = fork.located(history, flags["fork_at"])
    event = fork.forked(original, seq, flags["changes"], flags["new_id"])
    found = asyncio.run(fork.submit(original, seq, event, arguments.where, wait=flags["wait"]))
    lines, data = fork.report(event, found)
    inspection.show((lines, data), as_json=arguments.as_json)
    return 0 if found is None or found.after["outcome"] == "finished" else 1


# ---- the data level --------------------------------------------------------------------------------------


def _execute(history: History, arguments: ReplayArguments) -> int:
    from dalsegno.replay import data_replay

    config = data_replay.loaded_config(arguments.flags["model"], history)
    found = asyncio.run(data_replay.execute(history, config, arguments.flags["tolerance"]))
    for one in found:
        inspection.show(data_replay.report(one), as_json=arguments.as_json)
    return 0 if all(one.first is None for one in found) else 1


# ---- the load level --------------------------------------------------------------------------------------


def _load(arguments: ReplayArguments) -> int:
    from dalsegno.replay import load_replay

    flags, what = arguments.flags, arguments.what
    speed = flags["speed"] or 1.0
    if what is not None and (flags["form"] or Path(what).suffix in formats.SUFFIXES):
        return _load_trace(arguments, Path(what), speed)
    if flags["rate"]:
        raise click.UsageError("--rate goes with a TRACE")
    found = _arrivals(arguments).in_order(arguments.flags["last"])
    if not found:
        raise ClientError("no request was admitted: there is nothing to submit again")
    spread_s = (found[-1].reply.submitted_ns - found[0].reply.submitted_ns) / 1e9 / speed
    requests = "request" if len(found) == 1 else "requests"
    click.echo(f"submitting {len(found)} {requests} over {spread_s:,.1f} s", err=True)
    now = asyncio.run(load_replay.submit_again(found, _target(arguments), speed))
    inspection.show(load_replay.report(found, now, speed), as_json=arguments.as_json)
    return 0 if all(reply.outcome == "finished" for reply in now.values()) else 1


def _load_trace(arguments: ReplayArguments, path: Path, speed: float) -> int:
    from dalsegno.replay import trace_load

    trace = trace_options.read(path, arguments.flags["form"], arguments.flags["rate"])
    spread_s = (trace.calls[-1].timestamp or 0.0) / 1e3 / speed
    requests = "request" if len(trace.calls) == 1 else "requests"
    click.echo(f"submitting {len(trace.calls)} {requests} over {spread_s:,.1f} s", err=True)
    if trace.left_out:
        click.echo(plain(trace_options.left_out(trace)), err=True)
    now = asyncio.run(trace_load.submit(trace, _target(arguments), speed))
    inspection.show(trace_load.report(trace, now, speed), as_json=arguments.as_json)
    return 0 if all(reply.outcome == "finished" for reply in now) else 1


def _arrivals(arguments: ReplayArguments) -> "Arrivals":
    from dalsegno.replay.load_replay import Arrivals

    arrivals = Arrivals()
    if arguments.what is None:
        asyncio.run(_of_whole_log(arguments.where, arrivals))
        return arrivals
    is_folder = not arguments.where.is_named and Path(arguments.what).is_dir()
    paths = map(str, recorded_request.in_folder(Path(arguments.what))) if is_folder else [arguments.what]
    for path in paths:
        history = _history(path, arguments.where)
        for record in history.records:
            arrivals.take(record, history.subjects, is_redacted=history.is_redacted)
    return arrivals


async def _of_whole_log(where: LogSource, arrivals: "Arrivals") -> None:
    async with log_source.open_log(where) as (log, subjects):
        async for record in log.history(subjects.logged()):
            arrivals.take(record, subjects)


def _target(arguments: ReplayArguments) -> LogSource:
    target = arguments.flags["target"]
    if "://" in target:
        return LogSource(nats=target, prefix=arguments.where.prefix)
    return LogSource(data_dir=Path(target))
