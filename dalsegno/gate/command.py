"""`dalsegno gate`: holds recorded requests against the installed code and configuration, before a deployment.

It reads logs and bundles, decides again what they record (`dalsegno.gate.examination`), and says in groups
what would be decided differently (`dalsegno.gate.verdict`). It publishes nothing.

Status 0: the same, or accepted. 1: different. 2: wrong usage. 3: something could not be repeated. 4: nothing
was repeated.
"""

import asyncio
import json
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

import click

from configs.deployment import DeploymentConfig
from dalsegno.bundle import bundle_file
from dalsegno.config import options
from dalsegno.gate import (
    accepting,
    control,
    coverage,
    examination,
    junit,
    processes,
    recordings,
    selection,
    verdict,
)
from dalsegno.gate.accepting import AcceptFileError, Entry
from dalsegno.gate.deployments import Deployments
from dalsegno.gate.differences import LEVELS, Difference, Level
from dalsegno.gate.examination import Recording
from dalsegno.gate.results import Examined
from dalsegno.gate.selection import Contents, Seen, Window
from dalsegno.history.log_source import LogSource
from dalsegno.replay import recorded_request
from dalsegno.replay.recorded_request import History
from dalsegno.roles import gc_tuning
from dalsegno.terminal.sanitise import plain
from shared.errors import ClientError, DalSegnoError

_DEFAULT: Final[tuple[Level, ...]] = ("control", "schedule")
_EXPIRED: Final = "its submission has expired"
_OF_EACH: Final = 1
"""Requests of each outcome and layout whose nodes are run again, without --sample."""
_LARGE: Final = 20_000
"""Records from which it is worth the time to fork several processes for one log."""


def _levels(ctx: click.Context, parameter: click.Parameter, value: str | None) -> tuple[Level, ...] | None:
    if value is None:
        return None
    names = [one.strip() for one in value.split(",")]
    if unknown := [one for one in names if one not in LEVELS]:
        raise click.BadParameter(f"expected some of {','.join(LEVELS)}; found {unknown[0]!r}")
    return tuple(one for one in LEVELS if one in names)


def _window(ctx: click.Context, parameter: click.Parameter, value: str | None) -> Window | None:
    try:
        return None if value is None else selection.window(value)
    except ClientError as error:
        raise click.BadParameter(error.message) from error


@click.command()
@click.argument("sources", metavar="[SOURCE]...", nargs=-1)
@click.option("--last", type=click.IntRange(min=1), help="The newest requests only.")
@click.option(
    "--window",
    "within",
    metavar="FROM..TO",
    callback=_window,
    help="Those submitted then: positions or times.",
)
@click.option(
    "--sample", type=click.IntRange(min=1), metavar="K", help="K of each outcome, code, family and layout."
)
@click.option(
    "--levels",
    metavar="LEVELS",
    callback=_levels,
    help="Some of control,schedule,data. [default: control,schedule]",
)
@click.option(
    "--config",
    "model",
    metavar="MODEL",
    help="For schedule and data: a name, YAML file or checkpoint. [default: the recorded ones]",
)
@click.option("--tolerance", type=click.FloatRange(min=0), help="For data: as for `replay`. [default: exact]")
@click.option(
    "--accept",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="A YAML file of intended differences.",
)
@click.option(
    "--junit",
    "junit_file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the result as JUnit XML too.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")
@click.option(
    "--processes",
    "count",
    type=click.IntRange(min=1),
    metavar="N",
    help="Processes that decide at a time. [default: one per processor]",
)
@options.of_reader
def gate(sources: tuple[str, ...], **flags: Any) -> None:
    """Say which recorded decisions the installed code and configuration would make differently.

    A SOURCE is a data dir, a bundle, or a folder of bundles; without any, the log is found as by `log`.
    Status 0: the same; 1: different; 2: usage; 3: not everything can be repeated; 4: nothing was repeated.
    """
    entries = _entries(flags["accept"])
    with gc_tuning.collected_seldom():
        found = _Gate(sources, flags).run(entries)
    if flags["junit_file"] is not None:
        _write(flags["junit_file"], junit.document(found))
    if flags["as_json"]:
        click.echo(json.dumps(verdict.as_plain(found), ensure_ascii=False, default=str))
    else:
        for line in verdict.lines(found):
            click.echo(plain(line))
    sys.exit(int(found.status))


def _entries(path: Path | None) -> list[Entry]:
    if path is None:
        return []
    try:
        return accepting.read(path.read_text(encoding="utf-8"), str(path))
    except AcceptFileError as error:
        raise click.UsageError(plain(error.message)) from error
    except (OSError, UnicodeDecodeError) as error:
        raise click.UsageError(f"--accept: cannot read {path}: {error}") from error


def _write(path: Path, data: bytes) -> None:
    try:
        path.write_bytes(data)
    except OSError as error:
        raise ClientError(f"--junit: cannot write {path}: {error.strerror}") from error


class _Gate:
    """One run."""

    def __init__(self, sources: Sequence[str], flags: dict[str, Any]) -> None:
        self._where = LogSource(nats=flags["nats"], data_dir=flags["data_dir"], prefix=flags["prefix"])
        self._flags = flags
        try:
            self._sources = recordings.named(tuple(dict.fromkeys(sources)), self._where)
        except ClientError as error:
            raise click.UsageError(error.message) from error
        self._levels: tuple[Level, ...] = flags["levels"] or _DEFAULT
        self._processes: int = flags["count"] or processes.count()
        self._unreadable: list[tuple[str, str]] = []

    def run(self, entries: Sequence[Entry]) -> verdict.Verdict:
        """Read all sources, repeat, and reach a verdict."""
        found = self._read()
        contents = [selection.contents(one.records, one.subjects, one.name) for one in found]
        flags = self._flags
        chosen = selection.chosen(
            [seen for one in contents for seen in one.requests.values()],
            last=flags["last"],
            within=flags["within"],
            sample=flags["sample"],
        )
        other = self._other()
        deployments = [Deployments(one.configs, other) for one in found]
        results = self._repeated(found, chosen, deployments)
        if "data" in self._levels:
            results += self._computed(found, chosen)
        return verdict.reached(
            results,
            entries,
            levels=self._levels,
            explicit=flags["levels"] is not None,
            unreadable=self._unreadable,
            covered=self._covered(chosen, contents, deployments),
            today=datetime.now(UTC).date(),
        )

    def _other(self) -> DeploymentConfig | None:
        """The configuration that the user named."""
        if self._flags["model"] is None:
            return None
        from dalsegno.config import resolve

        return resolve.effective(self._flags["model"], (), with_weights=False).config

    # ---- reading -----------------------------------------------------------------------------------
    def _read(self) -> list[Recording]:
        found = [asyncio.run(recordings.of_log(name, where)) for name, where in self._sources.logs]
        self._unreadable += [
            (one.name, f"the log was tampered with: {one.tampered}") for one in found if one.tampered
        ]
        for path in self._sources.bundles:
            try:
                found.append(recordings.of_bundle(path))
            except bundle_file.BundleError as error:
                self._unreadable.append((path, error.message))
        return found

    # ---- control and schedule ----------------------------------------------------------------------
    def _repeated(
        self, found: Sequence[Recording], chosen: Sequence[Seen], deployments: Sequence[Deployments]
    ) -> list[Examined]:
        """Share out the work among processes; a large log is split by requests."""
        work: list[Callable[[], Examined]] = []
        for recording, known in zip(found, deployments, strict=True):
            own = [one for one in chosen if one.source == recording.name]
            requests = [one.request_id for one in own if one.summary is not None]
            if not requests:
                continue
            if "schedule" in self._levels:  # the longest piece of work comes first
                work.append(partial(examination.schedule_of, recording, frozenset(requests), known))
            if "control" in self._levels:
                parts = self._processes if len(recording.records) >= _LARGE else 1
                unended = frozenset(one.request_id for one in own if one.outcome == "open")
                work += [
                    partial(examination.control_of, recording, part, unended)
                    for part in control.shards(requests, parts)
                ]
        results = processes.run(work, self._processes) if work else []
        expired = Examined(
            level="control",
            source="",
            cannot={one.request_id: _EXPIRED for one in chosen if one.summary is None},
        )
        return [*results, *([expired] if expired.cannot else [])]

    # ---- data --------------------------------------------------------------------------------------
    def _computed(self, found: Sequence[Recording], chosen: Sequence[Seen]) -> list[Examined]:
        """Run the nodes of a sample again, one request after the other."""
        admitted = [one for one in chosen if one.layout and one.outcome != "open"]
        sample = selection.chosen(admitted, sample=self._flags["sample"] or _OF_EACH)
        by_name = {one.name: one for one in found}
        logs = dict(self._sources.logs)
        return [self._executed(by_name[one.source], one.request_id, logs.get(one.source)) for one in sample]

    def _executed(self, recording: Recording, request_id: str, where: LogSource | None) -> Examined:
        from dalsegno.replay import data_replay

        result = Examined(level="data", source=recording.name)
        try:
            history: History | None = recording.history
            if history is None:
                assert where is not None
                history = asyncio.run(recorded_request.read(where, request_id, with_media=True))
            config = data_replay.loaded_config(self._flags["model"], history)
            found = asyncio.run(data_replay.execute(history, config, self._flags["tolerance"]))
        except DalSegnoError as error:
            result.cannot[request_id] = error.message
            return result
        for one in found:
            result.decided[one.request_id] = sum(edge.compared for edge in one.edges)
            result.differences += [
                Difference(
                    level="data",
                    event=edge.name,
                    field="(value)",
                    recorded="as recorded",
                    found=edge.diverges,
                    request_id=one.request_id,
                    source=recording.name,
                )
                for edge in one.edges
                if edge.diverges is not None
            ]
        return result

    # ---- coverage ----------------------------------------------------------------------------------
    @staticmethod
    def _covered(
        chosen: Sequence[Seen], contents: Sequence[Contents], deployments: Sequence[Deployments]
    ) -> list[coverage.Covered]:
        digests = {(one.source, one.config) for one in chosen if one.config}
        for _, digest in digests:
            for known in deployments:
                known.of(digest)
        return coverage.covered(chosen, contents, [one for known in deployments for one in known.used])
