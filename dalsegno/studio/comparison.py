"""Two requests beside one another: their course, values, events and answers. Pure."""

from collections import Counter
from difflib import SequenceMatcher
from typing import Any, Final

import msgspec

from dalsegno.replay.recorded_run import Run, run_of
from dalsegno.replay.run_comparison import compared, first_difference
from dalsegno.studio.study import Study

_MOST_EVENTS: Final = 3_000
"""Events of one request that are aligned; the effort grows with the square."""
_BETWEEN: Final = frozenset({"output.chunk", "stream.sent", "stream.taken"})
"""Events whose number depends on the time that passes: they are counted, and not aligned."""


def comparison(one: Study, other: Study) -> dict[str, Any]:
    """Return what two requests have in common, and what not, as JSON values."""
    runs = [
        run_of(s.history.records, s.history.subjects, s.request_id, s.history.left_out) for s in (one, other)
    ]
    first, second = one.request(), other.request()
    return {
        "heads": [_head(request) for request in (first, second)],
        "kinds": _kinds(first, second),
        "edges": [msgspec.to_builtins(edge) for edge in compared(runs[0], runs[1], None)],
        "texts": _texts(runs[0], runs[1]),
        "events": _events(one, other),
    }


def _head(request: dict[str, Any]) -> dict[str, Any]:
    explained, output = request["explained"], request["output"]
    found = {name: request[name] for name in ("request_id", "begin", "records")}
    if explained is None:
        return found
    return found | {
        "model": request["model"],
        "prompt": request["prompt"],
        "outcome": explained["outcome"],
        "seconds": explained["seconds"],
        "attempts": explained["attempts"],
        "mostly": None if explained["cause"] is None else explained["cause"]["text"],
        "first_chunk": output["t"][0] if output["t"] else None,
        "usage": output["usage"],
    }


def _kinds(first: dict[str, Any], second: dict[str, Any]) -> list[dict[str, Any]]:
    """The time on the critical path by kind, longest first."""
    sums: list[Counter[str]] = []
    for request in (first, second):
        total: Counter[str] = Counter()
        for part in (request["explained"] or {"parts": []})["parts"]:
            total[part["kind"]] += part["seconds"]
        sums.append(total)
    kinds = sorted(sums[0] | sums[1], key=lambda kind: -max(sums[0][kind], sums[1][kind]))
    return [{"kind": kind, "seconds": [sums[0][kind], sums[1][kind]]} for kind in kinds]


def _texts(one: Run, other: Run) -> list[dict[str, Any]]:
    """The texts of both by track, with the place of the first difference."""
    return [
        {
            "track": track,
            "texts": [one.text(track), other.text(track)],
            "parts_at": first_difference(one.text(track), other.text(track)),
        }
        for track in dict.fromkeys((*one.tracks, *other.tracks))
        if one.text(track) or other.text(track)
    ]


def _events(one: Study, other: Study) -> list[dict[str, Any]]:
    """The events of both in order; those of the same kind, step, attempt and rank are in one row."""
    rows = [
        [
            row
            for row in study.events(0, "", "", len(study.history.records))["rows"]
            if row["type"] not in _BETWEEN
        ]
        for study in (one, other)
    ]
    left, right = (side[:_MOST_EVENTS] for side in rows)
    keys = [[_key(study, row) for row in side] for study, side in ((one, left), (other, right))]
    found: list[dict[str, Any]] = []
    for _, begin, end, first, last in SequenceMatcher(None, keys[0], keys[1], autojunk=False).get_opcodes():
        for place in range(max(end - begin, last - first)):
            a = left[begin + place] if begin + place < end else None
            b = right[first + place] if first + place < last else None
            if a is not None and b is not None and _key(one, a) != _key(other, b):
                found += [_pair(a, None), _pair(None, b)]
            else:
                found.append(_pair(a, b))
    return found


def _pair(a: dict[str, Any] | None, b: dict[str, Any] | None) -> dict[str, Any]:
    return {"a": _short(a), "b": _short(b)}


def _short(row: dict[str, Any] | None) -> dict[str, Any] | None:
    return None if row is None else {name: row[name] for name in ("seq", "t", "type", "writer", "text")}


def _key(study: Study, row: dict[str, Any]) -> tuple[Any, ...]:
    """Return the key under which events of two requests count as the same."""
    position = study.timeline.positions[study.place_of(row["seq"])]
    event = position.event
    writer = str(row["writer"]).partition("/")[0]
    if event is None:
        return row["type"], writer
    is_gateway = writer.startswith("g-")
    rank = getattr(event, "rank", None)
    return row["type"], event.attempt, event.index, rank, "gateway" if is_gateway else writer
