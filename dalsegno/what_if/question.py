"""A question about recorded traffic under another configuration, and its answer.

The command and the studio ask with the same function. It computes for seconds, and reads nothing.
"""

from collections.abc import Sequence
from typing import Any, Final, Literal, NamedTuple

import msgspec

from configs.deployment import PROCESS_SECTIONS, ConfigError
from dalsegno.config import layers
from dalsegno.config.layers import Setting
from dalsegno.gate import admission, selection
from dalsegno.gate.deployments import Deployments
from dalsegno.gate.examination import PARTLY, Recording
from dalsegno.gate.recorded_decisions import for_conductor, index
from dalsegno.traces import tokenizer, trace_options
from dalsegno.traces.calls import Trace, counted
from dalsegno.what_if import decision_report, decisions, recorded_load, time_report, times, traces
from dalsegno.what_if.decisions import Otherwise
from models import registry
from shared.errors import ClientError

MODEL_KEYS: Final = frozenset({"model", "checkpoint", "name", "voices", "devices", "data_dir"})
"""Keys of another model or machine: nothing that was recorded tells what they do."""


SIMULATED: Final = frozenset(
    {"max_sequences", "max_step_tokens", "block_size", "prefix_cache", "decode_slowdown_limit"}
)
"""Keys of `model_kwargs` that batching depends on, and the cost of a given batch does not."""


class CannotTellError(ClientError):
    """The recording does not answer the question."""

    code = "cannot_tell"


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked.

    Attributes:
        changes: settings, each as `KEY=VALUE`.
        last: only the newest requests; None for all.
        seeds: of simulated times, the number of simulations.
        trace: requests instead of the recorded ones; for times only.
    """

    changes: Sequence[str]
    level: Literal["decisions", "times"] = "decisions"
    last: int | None = None
    seeds: int = 5
    trace: Trace | None = None

    @property
    def settings(self) -> tuple[Setting, ...]:
        """The changes, parsed.

        Raises:
            ConfigError: a change is no setting, or changes nothing that a recording tells.
        """
        return settings_of(self.changes)


class Answer(NamedTuple):
    """The answer as lines, and as JSON values."""

    lines: list[str]
    data: dict[str, Any]


def answer(recording: Recording, asked: Question) -> Answer:
    """Answer a question from a recording.

    Raises:
        ConfigError: a change is no setting, or changes nothing that a recording tells.
        CannotTellError: this recording does not tell.
        NotCalibratedError: the simulation does not repeat the recorded run.
    """
    return _times(recording, asked) if asked.level == "times" else _decisions(recording, asked)


def settings_of(changes: Sequence[str]) -> tuple[Setting, ...]:
    """Parse changes, each as `KEY=VALUE`; refuse keys on which nothing recorded depends.

    Raises:
        ConfigError: a change is no setting, or changes nothing that a recording tells.
    """
    found = tuple(map(layers.of_flag, changes))
    for one in found:
        section = one.key.partition(".")[0]
        if section in PROCESS_SECTIONS:
            raise ConfigError(
                f"--set {one.key}: expected a key that decisions or times depend on, such as "
                f"max_concurrent_requests; none depends on {section}.*"
            )
        if one.key in MODEL_KEYS:
            raise ConfigError(
                f"--set {one.key}: expected a key of scheduling or of the engine; the recording does not "
                "tell what another model or machine would do"
            )
    return found


# ---- decisions -----------------------------------------------------------------------------------------


def check_source(recording: Recording) -> None:
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


def _decisions(recording: Recording, asked: Question) -> Answer:
    check_source(recording)
    contents = selection.contents(recording.records, recording.subjects, recording.name)
    seen = selection.chosen(list(contents.requests.values()), last=asked.last)
    chosen = {one.request_id for one in seen if one.summary is not None}
    if not chosen:
        raise CannotTellError("there are no requests in this recording")
    found, notes = _decided_otherwise(recording, asked.settings)
    changes = [one for one in found.changes if one.request_id in chosen]
    notes += decision_report.notes_of(found)
    arguments = (found, changes, len(chosen), asked.changes, notes)
    return Answer(list(decision_report.lines(*arguments)), decision_report.as_plain(*arguments))


def _decided_otherwise(recording: Recording, settings: Sequence[Setting]) -> tuple[Otherwise, list[str]]:
    subjects = recording.subjects
    records = [one for one in recording.records if for_conductor(one.subject, subjects)]
    recorded = index(records, subjects, registry.graph)
    before, after = Deployments(recording.configs), Deployments(recording.configs, settings=settings)
    epochs_before, epochs_after = before.of_epochs(recorded), after.of_epochs(recorded)
    known = [number for number, one in epochs_before.items() if not isinstance(one, str)]
    if not known:
        why = next(iter(epochs_before.values()), "no conductor has led in this recording")
        raise CannotTellError(without_advice(why))
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


def without_advice(why: object) -> str:
    """The reason why a configuration is not known, without the gate's advice to name another one."""
    return str(why).partition("; name one with --config")[0]


def _equal(one: Any, other: Any) -> bool:
    return bool(msgspec.structs.replace(other, config_digest=one.config_digest) == one)


# ---- times ---------------------------------------------------------------------------------------------


def _times(recording: Recording, asked: Question) -> Answer:
    changes = asked.settings
    for one in changes:
        section, _, key = one.key.partition(".")
        if section == "model_kwargs" and key not in SIMULATED:
            raise ConfigError(
                f"--set {one.key}: expected one of {', '.join(sorted(SIMULATED))}; the recording does not "
                "tell what it does to the cost of a step"
            )
    check_source(recording)
    if recording.history is not None:
        raise CannotTellError("a bundle has one request: times need a log, with the requests beside it")
    subjects = recording.subjects
    records = [one for one in recording.records if for_conductor(one.subject, subjects)]
    recorded = index(records, subjects, registry.graph)
    digest = next((epoch.configs[-1] for epoch in reversed(recorded.epochs.values()) if epoch.configs), "")
    was = _side(Deployments(recording.configs), digest)
    if isinstance(was, str):
        raise CannotTellError(without_advice(was))
    becomes = _side(Deployments(recording.configs, settings=changes), digest)
    if isinstance(becomes, str):
        raise ConfigError(f"--set: {becomes}")
    load = recorded_load.read(records, recorded, subjects=subjects, graph_of=registry.graph)
    recorded_requests, notes = times.chosen(load, digest, asked.last)
    around = times.Around(subjects=subjects, graph_of=registry.graph)
    instead = None
    if asked.trace is not None:
        calls = counted(asked.trace, tokenizer.of_checkpoint(was.config.checkpoint))
        if asked.trace.left_out:
            notes = [*notes, trace_options.left_out(asked.trace)]
        longest = max(one.input_length + one.output_length for one in calls)
        fits = min(was.config.max_seq_len, becomes.config.max_seq_len)
        if longest > fits:
            raise CannotTellError(
                f"the trace has a request of {longest:,} tokens, and max_seq_len is {fits:,}: "
                "record with a larger one, or shorten the trace"
            )
        instead = traces.asked_of(calls, recorded_requests, was.deployment.model, subjects)
    found = times.predict(load, recorded_requests, was, becomes, around, seeds=asked.seeds, instead=instead)
    found = msgspec.structs.replace(found, notes=[*notes, *found.notes])
    report = (found, len(recorded_requests if instead is None else instead), asked.changes)
    return Answer(list(time_report.lines(*report)), time_report.as_plain(*report))


def _side(known: Deployments, digest: str) -> times.Side | str:
    deployment = known.of(digest)
    if isinstance(deployment, str):
        return deployment
    config = known.config(digest)
    assert not isinstance(config, str), "it has a deployment"
    return times.Side(config=config, deployment=deployment)
