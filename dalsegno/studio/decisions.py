"""The conductor's recorded decisions beside the same decisions, made again from the recorded facts. Pure."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import msgspec

from conductor.core.replay import plain
from dalsegno.gate.differences import between
from dalsegno.history.event_description import summary_of, type_of, writer_of
from dalsegno.replay import recorded_request, verdicts
from dalsegno.replay.recorded_request import History
from dalsegno.replay.timeline import ReplayTimeline, TimelinePosition
from dalsegno.replay.verdicts import ControlResult
from shared.events import AnyEvent, EpochOpened, WorkerLost
from shared.subjects import CONDUCTOR_WRITER


def decisions_of(
    history: History, timeline: ReplayTimeline, causes: Mapping[int, int], begin_ns: int
) -> dict[str, Any]:
    """Return the decisions of all requests of a history, in log order, as JSON values.

    `match` of a decision is
        same        made again, and equal
        differs     made again, and different; `differences` has its values
        adopted     taken as recorded: it depends on all requests and workers
        unexpected  recorded, but not made again
        unchecked   after the first difference of its request: nothing is compared there
        missing     made again, but not recorded
    """
    found: list[dict[str, Any]] = []
    parted: set[str] = set()
    before: TimelinePosition | None = None
    for place, position in enumerate(timeline.positions):
        event = position.event
        if event is not None and _is_decision(event):
            row = _row(place, position, before, causes, begin_ns, parted)
            found.append(row)
        parted |= {name for name, one in position.verdicts.items() if not one.matches}
        before = position
    found += _missing(timeline)
    results = recorded_request.control(history)
    return {
        "decisions": found,
        "counts": Counter(row["match"] for row in found),
        "verdicts": [_verdict(one) for one in results],
    }


def _verdict(one: ControlResult) -> dict[str, Any]:
    lines = verdicts.lines(msgspec.structs.replace(one, source=None))
    return verdicts.as_plain(one) | {"lines": [line for line in lines if not line.startswith("  ")]}


def _is_decision(event: AnyEvent) -> bool:
    is_own = event.writer == CONDUCTOR_WRITER and event.request_id is not None
    return is_own and not isinstance(event, EpochOpened | WorkerLost)


def _row(
    place: int,
    position: TimelinePosition,
    before: TimelinePosition | None,
    causes: Mapping[int, int],
    begin_ns: int,
    parted: set[str],
) -> dict[str, Any]:
    event, record = position.event, position.record
    assert event is not None
    request_id = str(event.request_id)
    request = before.requests.get(request_id) if before is not None else None
    decided = request.expected.get(event.id) if request is not None else None
    recorded = plain(event)
    differences = [] if decided is None else [*between(recorded, plain(decided))]
    verdict = position.verdicts.get(request_id)
    is_first_mismatch = verdict is not None and verdict.mismatch is not None
    if request_id in parted:
        match = "unchecked"
    elif decided is not None:
        match = "differs" if differences else "same"
    else:
        match = "unexpected" if is_first_mismatch else "adopted"
    return {
        "place": place,
        "seq": record.seq,
        "t": (record.time_ns - begin_ns) / 1e9,
        "id": event.id,
        "request": request_id,
        "type": type_of(event),
        "writer": writer_of(event),
        "text": summary_of(event),
        "cause": causes.get(record.seq),
        "match": match,
        "differences": [
            {"field": field, "recorded": was, "decided": becomes} for field, was, becomes in differences
        ],
        "recorded": recorded,
        "decided": None if decided is None else plain(decided),
    }


def _missing(timeline: ReplayTimeline) -> list[dict[str, Any]]:
    """The decisions that are due at the end, and not recorded."""
    if not timeline.positions:
        return []
    last = timeline.positions[-1]
    return [
        {
            "place": None,
            "seq": None,
            "t": None,
            "id": decision.id,
            "request": request_id,
            "type": type_of(decision),
            "writer": "",
            "text": summary_of(decision),
            "cause": None,
            "match": "missing",
            "differences": [],
            "recorded": None,
            "decided": plain(decision),
        }
        for request_id, request in last.requests.items()
        for decision in request.expected.values()
    ]
