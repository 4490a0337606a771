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

from configs.deployment import PROCESS_SECTIONS, ConfigError
from dalsegno.config import layers, options
from dalsegno.config.layers import Setting
from dalsegno.gate import admission, recordings, selection
from dalsegno.gate.deployments import Deployments
from dalsegno.gate.examination import PARTLY, Recording
from dalsegno.gate.recorded_decisions import for_conductor, index
from dalsegno.history.log_source import LogSource
from dalsegno.roles import gc_tuning
from dalsegno.terminal.sanitise import plain
from dalsegno.traces import tokenizer, trace_options
from dalsegno.traces.calls import Trace, TraceError, counted
from dalsegno.what_if import decision_report, decisions, recorded_load, time_report, times, traces
from dalsegno.what_if.decisions import Otherwise
from dalsegno.what_if.times import NotCalibratedError
from models import registry
from shared.errors import ClientError, DalSegnoError

_CANNOT: Final = 3
_MODEL_KEYS: Final = frozenset({"model", "checkpoint", "name", "voices", "devices", "data_dir"})
"""Keys of another model or machine: nothing that was recorded tells what they do."""


_SIMULATED: Final = frozenset(
    {"max_sequences", "max_step_tokens", "block_size", "prefix_cache", "decode_slowdown_limit"}
)
"""Keys of `model_kwargs` that batching depends on, and the cost of a given batch does not."""


class CannotTellError(ClientError):
    """The recording does not answer the question."""

    code = "cannot_tell"


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
    settings = _settings(flags["changes"])
    where = LogSource(nats=flags["nats"], data_dir=flags["data_dir"], prefix=flags["prefix"])
    try:
        with gc_tuning.collected_seldom():
            trace = _trace(source, flags)
            recording = _recording(source if trace is None else str(flags["cost_from"]), where)
            answer = _times if flags["level"] == "times" else _decisions
            lines, data = answer(recording, settings, flags | {"trace": trace})
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


def _settings(changes: Sequence[str]) -> tuple[Setting, ...]:
    """Parse `--set`; refuse keys on which nothing recorded depends."""
    try:
        found = tuple(map(layers.of_flag, changes))
    except ConfigError as error:
        raise click.UsageError(plain(error.message)) from error
    for one in found:
        section = one.key.partition(".")[0]
        if section in PROCESS_SECTIONS:
            raise click.UsageError(
                f"--set {one.key}: expected a key that decisions or times depend on, such as "
                f"max_concurrent_requests; none depends on {section}.*"
            )
        if one.key in _MODEL_KEYS:
            raise click.UsageError(
                f"--set {one.key}: expected a key of scheduling or of the engine; the recording does not "
                "tell what another model or machine would do"
            )
    return found


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


# ---- decisions -----------------------------------------------------------------------------------------


def _check_source(recording: Recording) -> None:
    """Refuse a recording that does not tell what its conductors knew.

    Raises:
        CannotTellError: it does not.
    """
    if recording.begins:
        raise CannotTellError(recording.begins)
    if recording.tampered:
        raise CannotTellError(f"the log was tampered with: {recording.tampered}")
    if recording.history is not None and recording.history.is_redacted:
        raise CannotTellError("a redacted bundle has other requests than its log")


def _decisions(
    recording: Recording, settings: Sequence[Setting], flags: dict[str, Any]
) -> tuple[list[str], dict[str, Any]]:
    _check_source(recording)
    contents = selection.contents(recording.records, recording.subjects, recording.name)
    seen = selection.chosen(list(contents.requests.values()), last=flags["last"])
    chosen = {one.request_id for one in seen if one.summary is not None}
    if not chosen:
        raise CannotTellError("there are no requests in this recording")
    found, notes = _decided_otherwise(recording, settings)
    changes = [one for one in found.changes if one.request_id in chosen]
    notes += decision_report.notes_of(found)
    arguments = (found, changes, len(chosen), flags["changes"], notes)
    return list(decision_report.lines(*arguments)), decision_report.as_plain(*arguments)


def _decided_otherwise(recording: Recording, settings: Sequence[Setting]) -> tuple[Otherwise, list[str]]:
    subjects = recording.subjects
    records = [one for one in recording.records if for_conductor(one.subject, subjects)]
    recorded = index(records, subjects, registry.graph)
    before, after = Deployments(recording.configs), Deployments(recording.configs, settings=settings)
    epochs_before, epochs_after = before.of_epochs(recorded), after.of_epochs(recorded)
    known = [number for number, one in epochs_before.items() if not isinstance(one, str)]
    if not known:
        raise CannotTellError(
            str(next(iter(epochs_before.values()), "no conductor has led in this recording"))
        )
    for number in known:
        if isinstance(wrong := epochs_after[number], str):
            raise ConfigError(f"--set: {wrong}")
    notes = []
    if all(_equal(epochs_before[number], epochs_after[number]) for number in known):
        keys = ", ".join(dict.fromkeys(one.key for one in settings))
        notes.append(
            f"no decision depends on this change of {keys}; --level times says what it does to times"
        )
    if recording.history is not None:
        again = [
            admission.decide_again(records, recorded, one.of, subjects=subjects, graph_of=registry.graph)
            for one in (before, after)
        ]
        return decisions.of_bundle(*again), [*notes, PARTLY]
    kv_tokens = next((one.value for one in reversed(settings) if one.key == "kv_tokens"), None)
    found = decisions.decide_otherwise(
        records,
        recorded,
        epochs_before,
        epochs_after,
        subjects=subjects,
        graph_of=registry.graph,
        kv_tokens=kv_tokens,
    )
    return found, notes


def _without_advice(why: object) -> str:
    """The reason why a configuration is not known, without the gate's advice to name another one."""
    return str(why).partition("; name one with --config")[0]


def _equal(one: Any, other: Any) -> bool:
    return bool(msgspec.structs.replace(other, config_digest=one.config_digest) == one)


# ---- times ---------------------------------------------------------------------------------------------


def _times(
    recording: Recording, changes: Sequence[Setting], flags: dict[str, Any]
) -> tuple[list[str], dict[str, Any]]:
    for one in changes:
        section, _, key = one.key.partition(".")
        if section == "model_kwargs" and key not in _SIMULATED:
            raise click.UsageError(
                f"--set {one.key}: expected one of {', '.join(sorted(_SIMULATED))}; the recording does not "
                "tell what it does to the cost of a step"
            )
    _check_source(recording)
    if recording.history is not None:
        raise CannotTellError("a bundle has one request: times need a log, with the requests beside it")
    subjects = recording.subjects
    records = [one for one in recording.records if for_conductor(one.subject, subjects)]
    recorded = index(records, subjects, registry.graph)
    digest = next((epoch.configs[-1] for epoch in reversed(recorded.epochs.values()) if epoch.configs), "")
    was = _side(Deployments(recording.configs), digest)
    if isinstance(was, str):
        raise CannotTellError(_without_advice(was))
    becomes = _side(Deployments(recording.configs, settings=changes), digest)
    if isinstance(becomes, str):
        raise ConfigError(f"--set: {becomes}")
    load = recorded_load.read(records, recorded, subjects=subjects, graph_of=registry.graph)
    asked, notes = times.chosen(load, digest, flags["last"])
    around = times.Around(subjects=subjects, graph_of=registry.graph)
    instead = None
    if flags["trace"] is not None:
        calls = counted(flags["trace"], tokenizer.of_checkpoint(was.config.checkpoint))
        if flags["trace"].left_out:
            notes = [*notes, trace_options.left_out(flags["trace"])]
        longest = max(one.input_length + one.output_length for one in calls)
        fits = min(was.config.max_seq_len, becomes.config.max_seq_len)
        if longest > fits:
            raise CannotTellError(
                f"the trace has a request of {longest:,} tokens, and max_seq_len is {fits:,}: "
                "record with a larger one, or shorten the trace"
            )
        instead = traces.asked_of(calls, asked, was.deployment.model, subjects)
    found = times.predict(load, asked, was, becomes, around, seeds=flags["seeds"], instead=instead)
    found = msgspec.structs.replace(found, notes=[*notes, *found.notes])
    report = (found, len(asked if instead is None else instead), flags["changes"])
    return list(time_report.lines(*report)), time_report.as_plain(*report)


def _side(known: Deployments, digest: str) -> times.Side | str:
    deployment = known.of(digest)
    if isinstance(deployment, str):
        return deployment
    config = known.config(digest)
    assert not isinstance(config, str), "it has a deployment"
    return times.Side(config=config, deployment=deployment)
