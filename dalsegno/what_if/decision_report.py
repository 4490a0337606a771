"""The result of the level `decisions`, as text lines and as JSON values. Pure."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from dalsegno.what_if.decisions import KINDS, Change, Kind, Otherwise

_SHOWN: Final = 20
"""Changes of one kind that are named in the text; `--json` has all."""
_NAMED: Final = 8
"""Requests in the way that are named in a line."""
_TITLES: Final[dict[Kind, str]] = {
    "later": "admitted or resumed later",
    "earlier": "admitted or resumed earlier",
    "elsewhere": "placed elsewhere",
    "refused": "refused, or refused otherwise",
    "not_refused": "no longer refused",
    "admitted": "admitted, and not recorded as admitted then",
    "changed": "admitted with other values",
}


def lines(
    found: Otherwise, changes: Sequence[Change], requests: int, settings: Sequence[str], notes: Sequence[str]
) -> Iterator[str]:
    """The report; `changes` are those of the `requests` chosen ones."""
    affected = len({one.request_id for one in changes})
    yield f"what if {', '.join(settings)}: decisions, given the recorded past"
    yield (
        f"{affected:,} of {requests:,} {'request' if requests == 1 else 'requests'} would have been decided "
        f"otherwise; {found.decided:,} recorded decisions were decided again"
    )
    for kind in KINDS:
        of_kind = [one for one in changes if one.kind == kind]
        if not of_kind:
            continue
        yield f"{_TITLES[kind]}: {len(of_kind):,}"
        for one in of_kind[:_SHOWN]:
            yield f"  {one.request_id} at {one.seq}: {sentence(one)}"
        if len(of_kind) > _SHOWN:
            yield f"  and {len(of_kind) - _SHOWN:,} more; --json names all"
    yield from (f"note: {note}" for note in notes)


def notes_of(found: Otherwise) -> Iterator[str]:
    """What limits the result."""
    if found.unlike:
        requests = "1 request" if len(found.unlike) == 1 else f"{len(found.unlike):,} requests"
        yield (
            f"the recorded configuration decides {requests} otherwise, too, for example {found.unlike[0]}; "
            "these differences are left out (`dalsegno gate` shows them)"
        )
    if found.skipped:
        name, why = next(iter(found.skipped.items()))
        yield f"{len(found.skipped):,} requests were not decided again, for example {name}: {why}"
    if found.unproven:
        yield (
            f"of {found.unproven:,} decisions the log does not tell whether a conductor lived to make them; "
            "they are left out"
        )
    for rank, like in found.added_ranks.items():
        yield f"rank {rank} is not in the log: it is taken to have been there whenever rank {like} was"


def as_plain(
    found: Otherwise, changes: Sequence[Change], requests: int, settings: Sequence[str], notes: Sequence[str]
) -> dict[str, Any]:
    """The report as JSON values."""
    return {
        "level": "decisions",
        "set": list(settings),
        "requests": requests,
        "affected": len({one.request_id for one in changes}),
        "decided": found.decided,
        "changes": [msgspec.to_builtins(one) for one in changes],
        "notes": list(notes),
    }


def sentence(one: Change) -> str:
    """A change in words."""
    match one.kind:
        case "later":
            return f"would have waited{_in_the_way(one)}: {one.why}{_until(one)}"
        case "earlier":
            by = "" if one.seconds is None else f"{one.seconds:.3f} s "
            return f"{by}earlier, after record {one.found} instead of {one.recorded}: {one.why}"
        case "not_refused" if one.found == "waiting":
            return f"not refused with {one.recorded}; it would have waited{_in_the_way(one)}{_until(one)}"
        case "not_refused":
            return f"not refused with {one.recorded}, but admitted: {one.why}"
        case "refused" if not isinstance(one.found, dict):
            return f"refused with {one.found}: {one.why}"
        case "admitted":
            return f"admitted: {one.why}"
        case _:
            return f"{_values(one.recorded, one.found)}{f': {one.why}' if one.why else ''}"


def _values(recorded: Any, found: Any) -> str:
    return ", ".join(
        f"{name} {_value(recorded.get(name))} -> {_value(value)}" for name, value in found.items()
    )


def _value(one: Any) -> str:
    """A value of an event; one that is not there is its default."""
    return "(default)" if one is None else str(one)


def _in_the_way(one: Change) -> str:
    parts = []
    if one.behind:
        parts.append(f"behind {len(one.behind):,} running ({_names(one.behind)})")
    if one.ahead:
        parts.append(f"{len(one.ahead):,} waiting ({_names(one.ahead)})")
    return f" {' and '.join(parts)}" if parts else ""


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _until(one: Change) -> str:
    return (
        ""
        if one.seconds is None
        else f"; given their recorded ends, a place is free {one.seconds:.3f} s later"
    )
