"""The explanation of a request as text for people, and as JSON values for programs. Pure."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, Final

import msgspec

from dalsegno.gate.differences import as_json, between, cut
from dalsegno.history.event_description import stop_of
from dalsegno.history.summary import Summary, iso
from dalsegno.replay import verdicts
from dalsegno.replay.verdicts import ControlResult
from dalsegno.terminal.tables import Cell, Column
from dalsegno.why.comparison import Unusual
from dalsegno.why.parts import NS, Kind, Part, named
from dalsegno.why.request_facts import RequestFacts
from shared.events import (
    Failure,
    OutputChunk,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestRejected,
)

COLUMNS: Final = (
    Column("FROM", 9, is_right=True),
    Column("TOOK", 9, is_right=True),
    Column("SHARE", 7, is_right=True),
    Column("WHAT"),
)
_ROWS: Final = 20
"""From this many parts on, those of less than `_SHORT` that follow one another share a row."""
_SHORT: Final = 0.01
_DIFFERENCES: Final = 4
_STYLES: Final = {
    Kind.ADMISSION: "yellow",
    Kind.QUEUE: "yellow",
    Kind.PREEMPTED: "yellow",
    Kind.NEIGHBOURS: "yellow",
    Kind.HELD: "yellow",
    Kind.LOST: "red",
    Kind.SILENT: "red",
    Kind.AWAY: "red",
    Kind.NO_CONDUCTOR: "red",
}


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is known about the course of a request.

    Attributes:
        parts: of its whole time, in order (`dalsegno.why.critical_path`).
        neighbours: other requests of the same hour; empty for a bundle.
        decisions: the result of a control replay.
        until_ns: its end, or now if it is open.
    """

    facts: RequestFacts
    parts: list[Part]
    unusual: list[Unusual]
    neighbours: list[Summary]
    decisions: ControlResult
    until_ns: int

    @property
    def total_ns(self) -> int:
        """The time from the submission to the end."""
        return sum(part.duration_ns for part in self.parts)

    @property
    def cause(self) -> Part | None:
        """The parts with the same cause that took longest together, as one part."""
        longest: dict[tuple[Kind, str], Part] = {}
        for part in self.parts:
            key = part.kind, part.text
            known = longest.get(key)
            took_ns = part.duration_ns + (known.duration_ns if known is not None else 0)
            longest[key] = msgspec.structs.replace(part, begin_ns=0, end_ns=took_ns)
        return max(longest.values(), key=lambda part: part.duration_ns, default=None)


# ---- text ----------------------------------------------------------------------------------------------


def title(one: Explanation) -> str:
    """The request, its outcome and its whole time, in one line."""
    facts = one.facts
    attempts = f", {facts.attempts} attempts" if facts.attempts > 1 else ""
    return f"{facts.request_id}: {_outcome(one)} after {_seconds(one.total_ns)}{attempts}"


def rows(one: Explanation) -> list[Sequence[Cell]]:
    """The cells of the parts, under `COLUMNS`."""
    parts = _shortened(one.parts, one.total_ns) if len(one.parts) > _ROWS else one.parts
    shares = _shares([part.duration_ns for part in parts])
    return [
        (
            _seconds(part.begin_ns),
            _seconds(part.duration_ns),
            f"{share / 10:.1f} %",
            (part.text, _STYLES.get(part.kind, "")),
        )
        for part, share in zip(parts, shares, strict=True)
    ]


def remarks(one: Explanation) -> list[str]:
    """What is worth saying besides the parts: the main cause, output, what was unusual, and decisions."""
    found = []
    if (cause := one.cause) is not None and one.total_ns:
        share = 100 * cause.duration_ns / one.total_ns
        found.append(f"mostly: {cause.text} ({_seconds(cause.duration_ns)}, {share:.0f} %)")
    found += _failure_lines(one)
    found += _output_lines(one.facts)
    found += [f"unusual: {finding.text}" for finding in one.unusual]
    return [*found, *_decision_lines(one.decisions)]


def _outcome(one: Explanation) -> str:
    end = one.facts.end
    match end.event if end is not None else None:
        case RequestFinished() as event:
            stop = stop_of(event.stop_reasons)
            usage = event.usage
            return (
                f"finished, {', '.join(event.finish_reasons)}{stop}, {usage.prompt_tokens:,} prompt + "
                f"{usage.completion_tokens:,} new tokens,"
            )
        case RequestFailed() as event:
            return f"failed, {event.failure.code},"
        case RequestRejected() as event:
            return f"rejected, {event.failure.code},"
        case RequestCancelled() as event:
            return f"cancelled ({event.reason}),"
        case _:
            return "still open"


def _failure(facts: RequestFacts) -> Failure | None:
    event = facts.end.event if facts.end is not None else None
    return event.failure if isinstance(event, RequestFailed | RequestRejected) else None


def _failure_lines(one: Explanation) -> list[str]:
    failure = _failure(one.facts)
    if failure is None:
        return []
    lines = [f"error: {failure.code}: {failure.message}"]
    if isinstance(one.facts.end and one.facts.end.event, RequestRejected):
        at_ns = one.until_ns
        present = [
            other
            for other in one.neighbours
            if other.start_ns < at_ns and (other.end_ns is None or other.end_ns > at_ns)
        ]
        running = [other.request_id for other in present if other.admitted_ns and other.admitted_ns <= at_ns]
        waiting = [other.request_id for other in present if other.request_id not in running]
        for what, requests in (("ran", running), ("waited", waiting)):
            if requests:
                lines.append(f"then {what}: {named(requests[:8], len(requests))}")
    return lines


def _output_lines(facts: RequestFacts) -> list[str]:
    begin_ns = facts.submitted_ns
    times = [stored.time_ns for stored in facts.chunks if isinstance(stored.event, OutputChunk)]
    if not times:
        return []
    line = f"output: first after {_seconds(times[0] - begin_ns)}"
    pauses = [(after - before, before) for before, after in pairwise(times)]
    if pauses:
        pause_ns, at_ns = max(pauses)
        line += f", in {len(times):,} chunks; longest pause {_seconds(pause_ns)}"
        line += f" from {_seconds(at_ns - begin_ns)} on"
    return [line]


def _decision_lines(outcome: ControlResult) -> list[str]:
    first = f"decisions: {verdicts.finding(outcome)}"
    mismatch = outcome.verdict.mismatch
    if mismatch is None or mismatch.expected is None or mismatch.recorded is None:
        return [first]
    found = [
        f"  differs: {field}: recorded {cut(as_json(recorded))}, decided {cut(as_json(decided))}"
        for field, recorded, decided in between(mismatch.recorded, mismatch.expected)
    ]
    more = [f"  and {len(found) - _DIFFERENCES} more"] if len(found) > _DIFFERENCES else []
    return [first, *found[:_DIFFERENCES], *more]


# ---- JSON ----------------------------------------------------------------------------------------------


def as_plain(one: Explanation) -> dict[str, Any]:
    """The explanation as JSON values; times are seconds from the submission."""
    facts, cause, failure = one.facts, one.cause, _failure(one.facts)
    total_ns = one.total_ns
    return {
        "request_id": facts.request_id,
        "submitted": iso(facts.submitted_ns),
        "outcome": _outcome(one).rstrip(","),
        "error": None if failure is None else {"code": failure.code, "message": failure.message},
        "seconds": total_ns / NS,
        "attempts": facts.attempts,
        "cause": None if cause is None else _part(cause, total_ns),
        "parts": [_part(part, total_ns) for part in one.parts],
        "unusual": [msgspec.to_builtins(finding) | {"text": finding.text} for finding in one.unusual],
        "decisions": verdicts.as_plain(one.decisions),
    }


def _part(part: Part, total_ns: int) -> dict[str, Any]:
    return {
        "kind": str(part.kind),
        "text": part.text,
        "from_s": part.begin_ns / NS,
        "seconds": part.duration_ns / NS,
        "share": part.duration_ns / total_ns if total_ns else 0.0,
        "rank": part.rank,
        "step": part.step,
        "attempt": part.attempt,
        "requests": part.requests,
    }


# ---- internals -----------------------------------------------------------------------------------------


def _shortened(parts: Sequence[Part], total_ns: int) -> list[Part]:
    """Join short parts that follow one another into one."""
    found: list[Part] = []
    run: list[Part] = []

    def close() -> None:
        if len(run) > 1:
            text = f"{len(run)} short parts"
            joined = msgspec.structs.replace(
                run[0], kind=Kind.TRANSIT, end_ns=run[-1].end_ns, text=text, requests=[]
            )
            found.append(joined)
        else:
            found.extend(run)
        run.clear()

    for part in parts:
        if part.duration_ns < _SHORT * total_ns:
            run.append(part)
            continue
        close()
        found.append(part)
    close()
    return found


def _shares(durations_ns: Iterable[int]) -> list[int]:
    """Shares in tenths of a per cent that add up to 1,000: the largest remainders are rounded up."""
    durations = list(durations_ns)
    total = sum(durations)
    if not total:
        return [0 for _ in durations]
    floors = [1000 * one // total for one in durations]
    by_rest = sorted(range(len(durations)), key=lambda place: -(1000 * durations[place] % total))
    for place in by_rest[: 1000 - sum(floors)]:
        floors[place] += 1
    return floors


def _seconds(ns: int) -> str:
    if ns < 10_000_000:
        return f"{ns / 1e6:.1f} ms"
    return f"{ns / 1e6:.0f} ms" if ns < NS else f"{ns / NS:.2f} s"
