"""`dalsegno replay`: take a request that was served apart, and find out whether it is what it should be.

Of a log, or of bundles (`dalsegno.bundle.bundle_file`), which need no server and no model. Three levels, and
each says which it is:

    control    the decisions, from the recorded facts                    (what it does unless told otherwise)
    data       the nodes, from their recorded inputs                     --execute
    load       the same arrivals and sizes, on another deployment        --load

Status 0: all is as it was recorded. 1: something is not, or cannot be replayed. A replay publishes nothing;
`--fork-at` and `--load` are new requests to a running deployment, and the old ones are not touched.
"""

import asyncio
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from conductor.core.replay import Replayer
from dalsegno.bundle import bundle_file
from dalsegno.config import options
from dalsegno.history import log_source, request_records
from dalsegno.history.log_source import LogSource
from dalsegno.replay import inspection, recorded_request, verdicts
from dalsegno.replay.recorded_request import History
from dalsegno.replay.verdicts import ControlResult
from dalsegno.roles import gc_tuning
from models import registry
from shared.errors import ClientError
from shared.ids import is_token

if TYPE_CHECKING:
    from dalsegno.replay.load_replay import Arrivals


_OF_ONE: Final = ("state", "diff", "step", "fork_at", "execute")
"""What is done with one request alone, one at a time."""


@click.command()
@click.argument("what", metavar="[REQUEST_ID|BUNDLE|FOLDER]", required=False)
@click.option("--all", "whole", is_flag=True, help="Every request in the log.")
@click.option("--last", type=click.IntRange(min=1), help="With --all: tell of so many, the newest.")
@click.option("--until", metavar="WHERE", help="Stop behind a position of the log, an event's id or type.")
@click.option("--state", metavar="WHERE", help="Show the state behind that record.")
@click.option("--diff", nargs=2, metavar="FROM TO", help="Show what of the state changed between two.")
@click.option("--step", is_flag=True, help="Go through it record by record, by commands (`help` lists them).")
@click.option("--execute", is_flag=True, help="Run the nodes again here, and compare what they put out.")
@click.option(
    "--config",
    "model",
    metavar="MODEL",
    help="With --execute: a name, YAML file or checkpoint. [default: what was in force, if it is known]",
)
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0),
    help="With --execute: how far log probabilities, and samples by full scale, may differ. [default: exact]",
)
@click.option(
    "--load",
    "target",
    metavar="DATA_DIR|nats://...",
    help="Ask all of it again of the deployment that runs there, as it came, and compare the times.",
)
@click.option(
    "--speed",
    type=click.FloatRange(min=0, min_open=True),
    help="With --load: so many times as fast. [default: 1]",
)
@click.option("--fork-at", metavar="WHERE", help="Ask again, the same up to there; as a new request.")
@click.option(
    "--set",
    "changes",
    metavar="KEY=VALUE",
    multiple=True,
    help="With --fork-at: what is otherwise, e.g. temperature=0.7; may be said again.",
)
@click.option("--id", "new_id", metavar="ID", help="With --fork-at: the new request's. [default: made up]")
@click.option("--wait", is_flag=True, help="With --fork-at: show the answer, and how it differs.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per request, or per answer.")
@options.of_reader
def replay(what: str | None, **told: Any) -> None:
    """Decide a request again from its recorded facts, and compare.

    Its facts are fed through the conductor's core; what that decides must be what is recorded. A BUNDLE is a
    file that `dalsegno export` wrote, - is one on stdin; of a FOLDER all are replayed.
    """
    arguments = ReplayArguments(what, told)
    with gc_tuning.collected_seldom():
        sys.exit(arguments.run())


class ReplayArguments:
    """What the person told, looked at as a whole.

    Raises:
        click.UsageError: it cannot be meant.
    """

    def __init__(self, what: str | None, told: dict[str, Any]) -> None:
        self.what = what
        self.told = told
        self.as_json: bool = told["as_json"]
        self.where = LogSource(nats=told["nats"], data_dir=told["data_dir"], prefix=told["prefix"])
        self._check()

    def _check(self) -> None:
        told = self.told
        if (self.what is None) == (not told["whole"]):
            raise click.UsageError("name one REQUEST_ID, BUNDLE or FOLDER, or say --all")
        _needs(told, "last", "whole", "--all")
        for name in ("changes", "new_id", "wait"):
            _needs(told, name, "fork_at", "--fork-at")
        for name in ("model", "tolerance"):
            _needs(told, name, "execute", "--execute")
        _needs(told, "speed", "target", "--load")
        looks = [name for name in (*_OF_ONE, "target") if told[name]]
        if len(looks) > 1:
            raise click.UsageError(f"{' and '.join(map(_flag, looks))}: name one of them")
        if told["until"] and looks and looks != ["step"]:
            raise click.UsageError("--until goes with --step, or stands alone")
        if self.what is None and (told["until"] or looks not in ([], ["target"])):
            raise click.UsageError(f"{_flag((looks or ['until'])[0])} is of one request: name it")
        if told["step"] and self.what == bundle_file.STDIN:
            raise click.UsageError("the bundle is read from stdin: --step could read no commands")

    def run(self) -> int:
        """Do it; the exit status."""
        told, as_json = self.told, self.as_json
        if told["target"]:
            return _load(self)
        if self.what is None:
            return _all(self.where, told["last"], as_json=as_json)
        is_look = any(told[name] for name in ("until", *_OF_ONE))
        if not is_look and not self.where.is_told and Path(self.what).is_dir():
            return _folder(Path(self.what), as_json=as_json)
        history = _history(self.what, self.where)
        if told["fork_at"]:
            return _fork(history, self)
        if told["execute"]:
            return _execute(history, self)
        if told["step"]:
            return inspection.step(history, told["until"], as_json=as_json)
        if told["until"]:
            return inspection.until(history, told["until"], as_json=as_json)
        if told["state"]:
            return inspection.state(history, told["state"], as_json=as_json)
        if told["diff"]:
            return inspection.difference(history, *told["diff"], as_json=as_json)
        return _one(history, as_json=as_json)


def _needs(told: dict[str, Any], name: str, other: str, flag: str) -> None:
    if told[name] not in (None, (), False) and not told[other]:
        raise click.UsageError(f"{_flag(name)} goes with {flag}")


def _flag(name: str) -> str:
    spelt = {"changes": "set", "new_id": "id", "model": "config", "target": "load"}.get(name, name)
    return f"--{spelt.replace('_', '-')}"


def _history(what: str, where: LogSource) -> History:
    """A bundle, where there is a file of that name or it can be no request; else the log's request."""
    if what == bundle_file.STDIN or not is_token(what) or (not where.is_told and Path(what).exists()):
        return recorded_request.of_bundle(what)
    return asyncio.run(_of_log(where, what))


async def _of_log(where: LogSource, request_id: str) -> History:
    async with log_source.open_log(where) as (log, subjects):
        found = await request_records.collect(log, subjects, request_id)
    return recorded_request.of_log(msgspec.structs.replace(found, configs=log_source.configs(where)))


# ---- the control level -----------------------------------------------------------------------------------


def _one(history: History, *, as_json: bool) -> int:
    results = recorded_request.control(history)
    for outcome in results:
        verdicts.tell(outcome, as_json=as_json)
    return _status(results)


def _folder(folder: Path, *, as_json: bool) -> int:
    started = time.perf_counter()
    results: list[ControlResult] = []
    unreadable = events = 0
    for path in recorded_request.in_folder(folder):
        try:
            history = recorded_request.of_bundle(str(path))
        except bundle_file.BundleError as error:
            unreadable += 1
            _say_unreadable(path, error, as_json=as_json)
            continue
        found = recorded_request.control(history)
        for outcome in found:
            verdicts.tell(outcome, as_json=as_json)
        results += found
        events += len(history.records)
    _summarise(results, events, time.perf_counter() - started, as_json=as_json, unreadable=unreadable)
    return 1 if unreadable else _status(results)


def _say_unreadable(path: Path, error: bundle_file.BundleError, *, as_json: bool) -> None:
    told = {"level": "control", "source": str(path), "matches": False, "error": error.message}
    inspection.show(([error.message], told), as_json=as_json)


def _all(where: LogSource, last: int | None, *, as_json: bool) -> int:
    started = time.perf_counter()
    results, events = asyncio.run(_replay_all(where, last))
    for outcome in results:
        verdicts.tell(outcome, as_json=as_json)
    _summarise(results, events, time.perf_counter() - started, as_json=as_json)
    return _status(results)


async def _replay_all(where: LogSource, last: int | None) -> tuple[list[ControlResult], int]:
    async with log_source.open_log(where) as (log, subjects):
        replayer = Replayer(registry.graph, subjects, pins=verdicts.pins)
        events = 0
        async for record in log.history(subjects.logged()):
            replayer.take(record)
            events += 1
        found = list(replayer.close().values())
        results = [ControlResult(verdict=verdict) for verdict in (found[-last:] if last else found)]
        for outcome in results:
            request_id = outcome.verdict.request_id
            # Few differ; or a version that fits nothing, and then each is worth its why.
            if not outcome.verdict.matches and is_token(request_id):
                one = await request_records.collect(log, subjects, request_id)
                outcome.cannot = verdicts.why_not(one.records, subjects, request_id)
    return results, events


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
    click.echo(f"{verdicts.summary(results)}{files}; {took}")


def _status(results: list[ControlResult]) -> int:
    return 0 if all(outcome.matches for outcome in results) else 1


# ---- another version of it -------------------------------------------------------------------------------


def _fork(history: History, arguments: ReplayArguments) -> int:
    from dalsegno.replay import fork

    told = arguments.told
    original, seq = fork.located(history, told["fork_at"])
    event = fork.forked(original, seq, told["changes"], told["new_id"])
    found = asyncio.run(fork.ask(original, seq, event, arguments.where, wait=told["wait"]))
    lines, data = fork.told(event, found)
    inspection.show((lines, data), as_json=arguments.as_json)
    return 0 if found is None or found.after["outcome"] == "finished" else 1


# ---- the data level --------------------------------------------------------------------------------------


def _execute(history: History, arguments: ReplayArguments) -> int:
    from dalsegno.replay import data_replay

    config = data_replay.loaded_config(arguments.told["model"], history)
    found = asyncio.run(data_replay.execute(history, config, arguments.told["tolerance"]))
    for one in found:
        inspection.show(data_replay.told(one), as_json=arguments.as_json)
    return 0 if all(one.first is None for one in found) else 1


# ---- the load level --------------------------------------------------------------------------------------


def _load(arguments: ReplayArguments) -> int:
    from dalsegno.replay import load_replay

    speed = arguments.told["speed"] or 1.0
    found = _arrivals(arguments).in_order(arguments.told["last"])
    if not found:
        raise ClientError("there is nothing to ask again: no request was let in")
    spread_s = (found[-1].reply.submitted_ns - found[0].reply.submitted_ns) / 1e9 / speed
    requests = "request" if len(found) == 1 else "requests"
    click.echo(f"asking {len(found)} {requests} over {spread_s:,.1f} s", err=True)
    now = asyncio.run(load_replay.ask_again(found, _target(arguments), speed))
    inspection.show(load_replay.told(found, now, speed), as_json=arguments.as_json)
    return 0 if all(reply.outcome == "finished" for reply in now.values()) else 1


def _arrivals(arguments: ReplayArguments) -> "Arrivals":
    from dalsegno.replay.load_replay import Arrivals

    arrivals = Arrivals()
    if arguments.what is None:
        asyncio.run(_of_whole_log(arguments.where, arrivals))
        return arrivals
    is_folder = not arguments.where.is_told and Path(arguments.what).is_dir()
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
    target = arguments.told["target"]
    if "://" in target:
        return LogSource(nats=target, prefix=arguments.where.prefix)
    return LogSource(data_dir=Path(target))
