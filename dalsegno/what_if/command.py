"""`dalsegno what-if`: recorded traffic under another configuration.

    decisions   what would have been decided otherwise, given the recorded past: exact
    times       how long requests would have taken: simulated, with costs learned from the recorded run

It reads a log or a bundle and publishes nothing.

Status 0: done. 2: wrong usage. 3: the question cannot be answered from this recording.
"""

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

import click
import msgspec

from configs.deployment import ConfigError
from dalsegno.config import options
from dalsegno.gate import recordings
from dalsegno.gate.examination import Recording
from dalsegno.history.log_source import LogSource
from dalsegno.roles import gc_tuning
from dalsegno.terminal.sanitise import plain
from dalsegno.traces import trace_options
from dalsegno.traces.calls import Trace, TraceError
from dalsegno.what_if import time_report
from dalsegno.what_if.question import Question, answer, settings_of
from dalsegno.what_if.times import NotCalibratedError
from shared.errors import ClientError, DalSegnoError

_CANNOT: Final = 3


@click.command("what-if")
@click.argument("source", metavar="[SOURCE]", required=False)
@click.option(
    "--set",
    "changes",
    metavar="KEY=VALUE",
    multiple=True,
    required=True,
    help="Another value of a configuration key; may be repeated.",
)
@click.option(
    "--level",
    type=click.Choice(["decisions", "times"]),
    default="decisions",
    show_default=True,
    help="What to tell.",
)
@click.option("--last", type=click.IntRange(min=1), help="The newest requests only.")
@click.option(
    "--seeds",
    type=click.IntRange(min=1, max=100),
    default=5,
    show_default=True,
    help="For times: simulations, whose lowest and highest results are shown.",
)
@click.option(
    "--cost-from",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    metavar="DATA_DIR",
    help="For times of a trace: the recorded run from which costs and configuration are learned.",
)
@trace_options.of_trace
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")
@options.of_reader
def what_if(source: str | None, **flags: Any) -> None:
    """Say what another configuration would have done with the recorded requests.

    SOURCE is a data dir, a bundle or, with --cost-from, a trace; without it, the log is found as by `log`.
    Status 0: done; 2: usage; 3: this recording does not tell.
    """
    _check(flags["changes"])
    where = LogSource(nats=flags["nats"], data_dir=flags["data_dir"], prefix=flags["prefix"])
    try:
        with gc_tuning.collected_seldom():
            trace = _trace(source, flags)
            recording = _recording(source if trace is None else str(flags["cost_from"]), where)
            asked = Question(
                changes=flags["changes"],
                level=flags["level"],
                last=flags["last"],
                seeds=flags["seeds"],
                trace=trace,
            )
            lines, data = answer(recording, asked)
    except ConfigError as error:
        raise click.UsageError(plain(error.message)) from error
    except DalSegnoError as error:
        _refuse(error, as_json=flags["as_json"], level=flags["level"])
    if flags["as_json"]:
        click.echo(json.dumps(data, ensure_ascii=False, default=str))
        return
    for line in lines:
        click.echo(plain(line))


def _refuse(error: DalSegnoError, *, as_json: bool, level: str) -> NoReturn:
    """Say why there is no answer; of a calibration that is too far off, also by how much."""
    calibration = error.calibration if isinstance(error, NotCalibratedError) else {}
    if as_json:
        data = {"level": level, "cannot": error.message, "calibration": msgspec.to_builtins(calibration)}
        click.echo(json.dumps(data, ensure_ascii=False))
    elif calibration:
        for line in time_report.calibration_lines(calibration):
            click.echo(plain(line))
    click.echo(plain(f"Error: {error.message}"), err=True)
    sys.exit(_CANNOT)


def _check(changes: Sequence[str]) -> None:
    """Refuse wrong settings before anything is read."""
    try:
        settings_of(changes)
    except ConfigError as error:
        raise click.UsageError(plain(error.message)) from error


def _trace(source: str | None, flags: dict[str, Any]) -> Trace | None:
    """Read a trace; it has no decisions."""
    if flags["cost_from"] is None:
        if flags["form"] or flags["rate"]:
            raise click.UsageError("--format and --rate go with a trace as SOURCE, and with --cost-from")
        return None
    if source is None or flags["level"] != "times":
        raise click.UsageError("--cost-from goes with a trace as SOURCE, and with --level times")
    try:
        return trace_options.read(Path(source), flags["form"], flags["rate"])
    except TraceError as error:
        raise click.UsageError(plain(error.message)) from error


def _recording(source: str | None, where: LogSource) -> Recording:
    try:
        sources = recordings.named(() if source is None else (source,), where)
    except ClientError as error:
        raise click.UsageError(plain(error.message)) from error
    if len(sources.logs) + len(sources.bundles) != 1:
        raise click.UsageError("expected one SOURCE, a data dir or a bundle; found several")
    if sources.bundles:
        return recordings.of_bundle(sources.bundles[0])
    [(name, log)] = sources.logs
    return asyncio.run(recordings.of_log(name, log))
