"""The verdict of a gate: groups of differences, what could not be repeated, coverage, exit status. Pure."""

from collections import Counter
from collections.abc import Collection, Sequence
from datetime import date
from enum import IntEnum
from typing import Any

import msgspec

from dalsegno.gate import coverage, differences
from dalsegno.gate.accepting import Entry, judged
from dalsegno.gate.coverage import Covered
from dalsegno.gate.differences import LEVELS, Group, Level, grouped
from dalsegno.gate.results import Examined


class Status(IntEnum):
    """The exit status."""

    SAME = 0
    DIFFERENT = 1
    USAGE = 2
    NOT_REPLAYABLE = 3
    NOTHING = 4


class Failed(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that could not be repeated, for one reason.

    Attributes:
        counts: True if this makes the status `NOT_REPLAYABLE`; a level that nobody named does not.
    """

    level: Level
    reason: str
    requests: list[str]
    counts: bool


class LevelTotal(msgspec.Struct, frozen=True, kw_only=True):
    """The size of one level: requests and decisions (of data: values) that were compared."""

    level: Level
    requests: int
    decisions: int


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a gate.

    Attributes:
        groups: differences that nothing accepts; `accepted` has those that an entry accepts.
        unused, expired: entries of the accept file that fail the gate.
        failed: what could not be repeated.
        events: by event type, the number of requests that recorded one.
        notes: further lines, each once.
    """

    status: Status
    levels: list[LevelTotal]
    groups: list[Group]
    accepted: list[tuple[Entry, list[Group]]]
    unused: list[Entry]
    expired: list[Entry]
    failed: list[Failed]
    coverage: list[Covered]
    events: dict[str, int]
    notes: list[str]


def reached(
    results: Sequence[Examined],
    entries: Sequence[Entry],
    *,
    levels: Sequence[Level],
    explicit: bool,
    unreadable: Collection[tuple[str, str]] = (),
    covered: Sequence[Covered] = (),
    today: date,
) -> Verdict:
    """Reach a verdict.

    Args:
        results: of all levels and sources.
        entries: those of the accept file.
        levels: the levels that were to be repeated.
        explicit: the user named them.
        unreadable: sources that cannot be read or trusted, each with the reason.
        covered: the coverage.
        today: for the expiry of entries.
    """
    totals = [_total(level, results) for level in levels]
    compared = {one.level: one.requests for one in totals}
    found = [difference for one in results for difference in one.differences]
    judgement = judged(found, entries, today)
    failed = _failed(results, explicit=explicit, unreadable=unreadable)
    groups = grouped(judgement.open, compared)
    events = next((one.seen for one in covered if one.name == coverage.EVENT_TYPES), {})
    if groups or judgement.unused or judgement.expired:
        status = Status.DIFFERENT
    elif any(one.counts for one in failed):
        status = Status.NOT_REPLAYABLE
    else:
        status = Status.SAME if any(compared.values()) else Status.NOTHING
    return Verdict(
        status=status,
        levels=totals,
        groups=groups,
        accepted=[(entry, grouped(members, compared)) for entry, members in judgement.accepted],
        unused=judgement.unused,
        expired=judgement.expired,
        failed=failed,
        coverage=list(covered),
        events=events,
        notes=_notes(results, groups),
    )


def _notes(results: Sequence[Examined], groups: Sequence[Group]) -> list[str]:
    """The notes of all results, each once."""
    notes = [f"{one.level}: {note}" for one in results for note in one.notes]
    if {"control", "schedule"} <= {group.level for group in groups}:
        notes.append(
            "schedule: differences may follow from those of control: a request that takes another course"
        )
    return list(dict.fromkeys(notes))


def _total(level: Level, results: Sequence[Examined]) -> LevelTotal:
    own = [one for one in results if one.level == level]
    return LevelTotal(
        level=level,
        requests=sum(len(one.decided) for one in own),
        decisions=sum(sum(one.decided.values()) for one in own),
    )


def _failed(
    results: Sequence[Examined], *, explicit: bool, unreadable: Collection[tuple[str, str]]
) -> list[Failed]:
    """Group what could not be repeated by level and reason."""
    reasons: dict[tuple[Level, str], list[str]] = {}
    for source, why in unreadable:
        reasons.setdefault(("control", why), []).append(source)
    for one in results:
        if one.whole:
            reasons.setdefault((one.level, one.whole), []).append(one.source)
        for request_id, why in one.cannot.items():
            reasons.setdefault((one.level, why), []).append(request_id)
    return [
        Failed(level=level, reason=why, requests=members, counts=explicit or level != "schedule")
        for (level, why), members in sorted(reasons.items(), key=lambda one: LEVELS.index(one[0][0]))
    ]


# ---- as text and as JSON ---------------------------------------------------------------------------------


def lines(verdict: Verdict) -> list[str]:
    """The verdict as text; the caller sanitises it."""
    counts = Counter(group.level for group in verdict.groups)
    shown = [_level_line(one, counts[one.level]) for one in verdict.levels if one.requests]
    shown += [differences.line_of(group) for group in verdict.groups]
    for entry, groups in verdict.accepted:
        for group in groups:
            why = f"{entry.reason} ({entry.author}, until {entry.expires})"
            shown.append(f"accepted: {why}: {differences.line_of(group)}")
    shown += [f"entry {one.place} accepts nothing: {one.name}: remove it" for one in verdict.unused]
    shown += [
        f"entry {one.place} expired on {one.expires}: {one.name} ({one.author})" for one in verdict.expired
    ]
    shown += [_failed_line(one) for one in verdict.failed]
    shown += verdict.notes
    shown += [coverage.line_of(one) for one in verdict.coverage]
    return [*shown, _last_line(verdict)]


def _level_line(total: LevelTotal, groups: int) -> str:
    what = "values" if total.level == "data" else "decisions"
    how = "as recorded" if not groups else f"{groups} {'group' if groups == 1 else 'groups'} of differences"
    many = "1 request" if total.requests == 1 else f"{total.requests:,} requests"
    return f"{total.level}: {many}, {total.decisions:,} {what}: {how}"


def _failed_line(one: Failed) -> str:
    many = f" and {len(one.requests) - 1:,} more" if len(one.requests) > 1 else ""
    return f"{one.level}: not replayable ({one.reason}): {one.requests[0] or 'the log'}{many}"


def _last_line(verdict: Verdict) -> str:
    match verdict.status:
        case Status.SAME:
            return "same" if not verdict.accepted else "same, except for what is accepted"
        case Status.DIFFERENT if verdict.groups:
            return "different"
        case Status.DIFFERENT:
            return "different: the accept file has entries that are unused or have expired"
        case Status.NOT_REPLAYABLE:
            return "no difference, but not everything could be repeated"
        case _:
            return "nothing was repeated: no request is in the selection"


def as_plain(verdict: Verdict) -> dict[str, Any]:
    """The verdict as JSON values."""
    found: dict[str, Any] = msgspec.to_builtins(msgspec.structs.replace(verdict, groups=[], accepted=[]))
    return found | {
        "status": verdict.status.name.lower(),
        "exit_status": int(verdict.status),
        "groups": [_group(one) for one in verdict.groups],
        "accepted": [
            {**msgspec.to_builtins(entry), "groups": [_group(one) for one in groups]}
            for entry, groups in verdict.accepted
        ],
    }


def _group(group: Group) -> dict[str, Any]:
    """A group without its members, except for the requests' ids."""
    found: dict[str, Any] = msgspec.to_builtins(msgspec.structs.replace(group, members=[]))
    del found["members"]
    found["values"] = [
        {"recorded": was, "found": becomes, "count": count} for was, becomes, count in group.values
    ]
    found["request_ids"] = list(dict.fromkeys(one.request_id for one in group.members))
    return found
