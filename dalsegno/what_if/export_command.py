"""`dalsegno export`: one request to a bundle (`dalsegno.bundle.export`), or a log's traffic to a trace."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import click

from dalsegno.bundle import export as bundles
from dalsegno.gate import recordings
from dalsegno.gate.recorded_decisions import for_conductor, index
from dalsegno.history.log_source import LogSource
from dalsegno.terminal.sanitise import plain
from dalsegno.traces import writing
from dalsegno.traces.writing import WRITTEN, WrittenFormat
from dalsegno.what_if import recorded_load, traces
from dalsegno.what_if.recorded_load import Asked
from models import registry
from shared.errors import ClientError

_OF_BUNDLES = [one for one in bundles.export.params if one.name != "request_id"]


@click.command(
    "export",
    params=[
        click.Argument(["request_id"], required=False),
        click.Option(["--all", "whole"], is_flag=True, help="The traffic of the whole log, as a trace."),
        click.Option(
            ["--format", "form"], type=click.Choice(WRITTEN), help="With --all: the format of the trace."
        ),
        *_OF_BUNDLES,
    ],
)
@click.pass_context
def export(
    ctx: click.Context, /, request_id: str | None, whole: bool, form: WrittenFormat | None, **flags: Any
) -> None:
    """Write one request to a file that can be replayed anywhere.

    The file contains every event of REQUEST_ID, and of the workers and epochs it depends on. `dalsegno replay
    FILE` reads it. With --all, write when requests came and how long they were; some formats have the texts
    of their prompts.
    """
    if (request_id is None) == (not whole):
        raise click.UsageError("name one REQUEST_ID, or say --all")
    if not whole:
        if form is not None:
            raise click.UsageError("--format goes with --all")
        ctx.invoke(bundles.export, request_id=request_id, **flags)
        return
    if form is None or flags["output"] is None:
        raise click.UsageError("--all goes with --format, such as --format mooncake, and -o FILE")
    if flags["payloads"] or flags["redact"]:
        raise click.UsageError(
            "--payloads and --redact are for one request; mooncake, dynamo and burstgpt have no texts"
        )
    where = LogSource(nats=flags["nats"], data_dir=flags["data_dir"], prefix=flags["prefix"])
    _write_trace(where, flags["output"], form, as_json=flags["as_json"])


def _write_trace(where: LogSource, path: str, form: WrittenFormat, *, as_json: bool) -> None:
    recording = asyncio.run(recordings.of_log("", where))
    subjects = recording.subjects
    records = [one for one in recording.records if for_conductor(one.subject, subjects)]
    recorded = index(records, subjects, registry.graph)
    load = recorded_load.read(recording.records, recorded, subjects=subjects, graph_of=registry.graph)
    finished = [one for one in load.requests if one.outcome == "finished"]
    lines, why_not = _lines(finished, form)
    if not lines:
        raise ClientError(f"nothing to export: each request of this log is {why_not}")
    count = len(lines) - (form == "burstgpt")
    with bundles.target(path) as file:
        file.write("".join(f"{line}\n" for line in lines).encode())
    if as_json:
        click.echo(json.dumps({"file": path, "requests": count}), err=path == "-")
        return
    left_out = len(load.requests) - count
    rest = f"; {left_out:,} are left out: {why_not}"
    requests = f"{count:,} {'request' if count == 1 else 'requests'}"
    click.echo(plain(f"{path}: {requests}{rest if left_out else ''}"), err=path == "-")


def _lines(finished: Sequence[Asked], form: WrittenFormat) -> tuple[list[str], str]:
    """The lines of a trace, and what the requests are that it leaves out."""
    match form:
        case "vllm" | "aiperf":
            lines = writing.lines_with_texts(traces.texts_of(finished), form)
            return list(lines), "not finished, or without a prompt of text alone"
        case _:
            calls = list(traces.calls_of(finished))
            lines = writing.lines_of(calls, form, finished[0].event.model) if calls else iter(())
            return list(lines), "not finished, or without one sequence of a language model"
