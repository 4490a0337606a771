"""One-line descriptions of log events for people: writer, type, contents. Pure; long values are cut."""

import json
from collections.abc import Mapping, Sequence
from typing import assert_never

from dalsegno.history.summary import iso
from shared.events import (
    AdapterLoaded,
    AdapterUnloaded,
    AnyEvent,
    BatchCancelled,
    BatchChecked,
    BatchClaimed,
    BatchCreated,
    BatchEnded,
    ConversationChanged,
    ConversationCreated,
    ConversationDeleted,
    DeadlinePassed,
    EpochOpened,
    LogSealed,
    NodeFired,
    NodeReady,
    NodeWork,
    OutputChunk,
    OutputFence,
    ProcessEnd,
    RequestAdmitted,
    RequestCancel,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestRejected,
    RequestResumed,
    RequestsRefused,
    RequestSubmitted,
    RequestWatched,
    SegmentStored,
    StreamSent,
    StreamTaken,
    TensorsReleased,
    WalkBegun,
    WalkCompleted,
    WalkFailed,
    WalkProgressed,
    WalkStop,
    WalkStopped,
    WorkerJoined,
    WorkerLeaving,
    WorkerLost,
)
from shared.sealing import seals
from shared.subjects import CONDUCTOR_WRITER

_LONGEST = 96
_LONG_WAIT_S = 0.1


def writer_of(event: AnyEvent) -> str:
    """The writer, with its epoch or incarnation if it has one."""
    if event.writer == CONDUCTOR_WRITER:
        return f"conductor/{event.epoch}"
    if event.writer.startswith("w") and event.incarnation is not None:
        return f"{event.writer}/{event.incarnation}"
    return event.writer or "(unnamed)"


def type_of(event: AnyEvent) -> str:
    """The event's type on the wire, without its version."""
    tag = str(event.__struct_config__.tag)
    return tag.rsplit(".", 1)[0]


def summary_of(event: AnyEvent) -> str:  # one branch per event type
    """The contents of the event in one line."""
    match event:
        case OutputChunk():
            track = f" of {event.track}" if event.track else ""
            content = (
                _short(repr(event.text))
                if event.data is None
                else f"{len(event.data)} bytes {event.modality}"
            )
            if event.advisory:
                return f"advisory chunk{track}: {content} {_short(repr(event.metadata))}"
            return f"chunk {event.index}{track}: {_count(len(event.token_ids), 'token')} {content}"
        case NodeReady():
            walks = "+".join(walk.name for walk in event.walks)
            return (
                f"step {event.index} ({walks}) to rank {event.rank}, attempt {event.attempt}: {event.reason}"
            )
        case WalkCompleted():
            facts = {name: value for walk in event.results for name, value in walk.facts.items()}
            spent = " ".join(f"{name} {seconds * 1e3:.1f} ms" for name, seconds in event.durations_s.items())
            line = f"step {event.index}, attempt {event.attempt}: {_short(_json(facts))} {spent}".rstrip()
            return line + _waits_of(event.work)
        case RequestSubmitted():
            inputs = event.inputs
            prompt = inputs.text or inputs.messages or inputs.token_ids or inputs.texts
            return f"model {event.model}: {_short(_json(prompt))}, answers to {event.origin}"
        case RequestAdmitted():
            adapter = f"; adapter {event.adapter.name} {event.adapter.digest[:12]}" if event.adapter else ""
            return f"{event.reason}; seed {event.seed}{adapter}"
        case RequestResumed():
            quarantine = "in quarantine, " if event.on_probation else ""
            return f"attempt {event.attempt}: {quarantine}{event.reason}"
        case DeadlinePassed():
            whose = "the request" if event.step is None else f"step {event.step}, attempt {event.attempt},"
            return f"{whose} missed its deadline, {iso(event.deadline_ns)}"
        case RequestRejected():
            return f"submission {event.submission_seq}: {event.failure.code}: {event.failure.message}"
        case RequestFinished():
            usage = event.usage
            ends = ", ".join(event.finish_reasons)
            stop = stop_of(event.stop_reasons)
            return f"{ends}{stop}; {usage.prompt_tokens} prompt + {usage.completion_tokens} new tokens"
        case RequestFailed():
            return f"{event.failure.code}: {event.failure.message}"
        case WalkFailed():
            return (
                f"step {event.index}, attempt {event.attempt}: {event.failure.code}: {event.failure.message}"
            )
        case RequestCancelled() | RequestCancel():
            return event.reason
        case RequestWatched():
            return (
                "no client of this gateway reads it" if event.is_over else "clients of this gateway read it"
            )
        case WalkStop():
            return f"step {event.index} on rank {event.rank}, attempt {event.attempt}: {event.reason}"
        case WalkBegun():
            return f"step {event.index}, attempt {event.attempt}: started in quarantine"
        case WalkProgressed():
            return f"step {event.index}, attempt {event.attempt}: further than before, {event.tokens} tokens"
        case WalkStopped():
            steps = f"{event.steps_after} engine steps after the stop was read"
            return f"step {event.index}: {steps}{_waits_of(event.work)}"
        case OutputFence():
            return f"chunks of attempts below {event.attempt} are void from here: {event.reason}"
        case EpochOpened():
            return f"{event.conductor} leads from here{_ended(event.ended)}"
        case LogSealed():
            return seals.described(event)
        case NodeFired():
            path = ".".join(map(str, event.path))
            handover = ", and its sequence continues there" if event.row is not None else ""
            stops = f", stops {', '.join(event.stops)}" if event.stops else ""
            return f"step {event.index}, walk {event.walk}: {event.node} at {path or 'once'}{stops}{handover}"
        case StreamSent():
            items = event.items.shape[0] if event.items is not None else 0
            end = ", the end" if event.end else ""
            return f"{event.stream} to {event.to}: {_count(items, 'item')} from {event.index}{end}"
        case StreamTaken():
            closed = ", which takes no more" if event.closed else ""
            return f"{event.stream}: {_count(event.taken, 'item')} used by {event.to}{closed}"
        case TensorsReleased():
            return _short(", ".join(event.keys))
        case WorkerJoined():
            weights = f"; weights {event.weights[:12]}" if event.weights else ""
            hosted = f"{', '.join(event.nodes)}; {event.kv_tokens} KV tokens{weights}"
            return f"rank {event.rank} on {event.device}: {hosted}{_ended(event.ended)}"
        case WorkerLeaving():
            return f"rank {event.rank} shuts down"
        case WorkerLost():
            return f"rank {event.rank}: {event.reason}"
        case AdapterLoaded():
            return f"{event.adapter.name} is {event.adapter.digest[:12]} in {event.adapter.folder}"
        case AdapterUnloaded():
            return f"{event.name} is no adapter"
        case BatchCreated():
            return _short(f"{event.endpoint}, file {event.input[:12]}, within {event.window}")
        case BatchClaimed():
            return f"{event.writer} runs it"
        case BatchChecked():
            return _count(event.lines, "line")
        case SegmentStored():
            return f"segment {event.segment}: {event.completed} completed, {event.failed} failed"
        case BatchCancelled():
            return ""
        case BatchEnded():
            return _short("; ".join([event.status, *(one.message for one in event.problems)]))
        case ConversationCreated():
            return _count(len(event.items), "item")
        case ConversationChanged():
            continued = f", with response {event.response}" if event.response else ""
            return f"{_count(len(event.added), 'item')} added, {len(event.removed)} removed{continued}"
        case ConversationDeleted():
            return ""
        case RequestsRefused():
            kinds = sorted(event.counts, key=lambda one: -one.count)
            return _short(", ".join(f"{one.count} {one.code}" for one in kinds))
        case _:
            assert_never(event)


def stop_of(reasons: Sequence[str | int | None]) -> str:
    """The strings and tokens that ended the choices of an answer, in brackets; nothing without any."""
    if not any(reason is not None for reason in reasons):
        return ""
    shown = (f"token {one}" if isinstance(one, int) else _short(repr(one)) for one in reasons)
    return f" (by {', '.join(shown)})"


def _waits_of(work: Mapping[str, NodeWork]) -> str:
    """The waits of a step's nodes over a tenth of a second, their preemptions and their drafts."""
    found = []
    for node, one in work.items():
        if one.waited_s > _LONG_WAIT_S:
            behind = f" behind {', '.join(one.behind)}" if one.behind else ""
            found.append(f"{node} waited {one.waited_s:.3f} s{behind}")
        if one.preemption_count:
            by = ", ".join(dict.fromkeys(preemption.by for preemption in one.preemptions if preemption.by))
            times = _count(one.preemption_count, "time")
            found.append(f"{node} was preempted {times}{f' by {by}' if by else ''}")
        if one.drafted:
            steps = _count(one.undrafted_steps, "step")
            without = f", and drafted none in {steps}" if one.undrafted_steps else ""
            found.append(f"{node} accepted {one.accepted} of {one.drafted} drafted tokens{without}")
    return f"; {'; '.join(found)}" if found else ""


def _ended(ends: Sequence[ProcessEnd]) -> str:
    """Describe the end of the process before this one, and of failed starts since."""
    if not ends:
        return ""
    first, *others = ends
    line = f"; process {first.pid} before it was {_ending(first)}"
    if not others:
        return line
    return f"{line}, and {_count(len(others), 'further start')} failed, the last one {_ending(others[-1])}"


def _ending(end: ProcessEnd) -> str:
    reason = f" because {end.reason}" if end.reason else ""
    line = f": {_short(end.last_line)}" if end.last_line and not end.signal else ""
    return f"{end.how}{reason}{line}"


def _count(number: int, name: str) -> str:
    return f"{number} {name}" if number == 1 else f"{number} {name}s"


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=repr)


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
