"""One recorded request, and what the studio's screens compute from its records; each thing once.

The methods compute for up to some seconds, for a request with a hundred thousand events: call them in a
thread. They return JSON values.
"""

import time
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import islice
from threading import RLock
from typing import Any, Final

import msgspec

from dalsegno.history.event_description import summary_of, type_of, writer_of
from dalsegno.history.prompts import prompt_of
from dalsegno.history.summary import Summary, iso
from dalsegno.replay import recorded_request
from dalsegno.replay.recorded_request import History
from dalsegno.replay.timeline import ReplayTimeline
from dalsegno.studio import lanes, media
from dalsegno.studio.causes import causes_of, effects_of
from dalsegno.studio.decisions import decisions_of
from dalsegno.studio.media import Answer, MadeMedium
from dalsegno.why import report
from dalsegno.why.command import explanations
from dalsegno.why.report import Explanation
from shared.errors import ClientError
from shared.events import MalformedEventError, decode
from shared.log.port import StoredRecord

PAGE: Final = 500
"""Events in one answer."""
_SHOWN_BYTES: Final = 512
"""Bytes of an unreadable record that are shown."""
_SHOWN_CHARS: Final = 32_768
"""Characters of one text of an event that are shown; the rest is counted."""
_SHOWN_OF_STATE: Final = 1_000
"""The same of a text in a state: the slider shows many states a second."""
_SHOWN_CHANGES: Final = 1_000
"""Changes of a value that are listed."""


class Study:
    """A request in its history.

    Args:
        history: the records of it and of its other parts, of workers, and of epochs.
        request_id: one of the history's requests.
        neighbours: other requests of that hour; empty if they are not known.
    """

    def __init__(self, history: History, request_id: str, neighbours: Sequence[Summary]) -> None:
        self.history = history
        self.request_id = request_id
        self._neighbours = list(neighbours)
        self._lock = RLock()

    # ---- computed once -----------------------------------------------------------------------------
    @cached_property
    def explanation(self) -> Explanation | None:
        """Why the request took so long; None if its submission is missing."""
        with self._lock:
            found = explanations(self.history, self._neighbours, now_ns=time.time_ns())
            return next((one for one in found if one.facts.request_id == self.request_id), None)

    @cached_property
    def timeline(self) -> ReplayTimeline:
        """The state after each record."""
        with self._lock:
            return recorded_request.timeline(self.history)

    @cached_property
    def causes(self) -> dict[int, int]:
        """By position, the position of the record that an event follows from."""
        with self._lock:
            return causes_of(self.timeline)

    @cached_property
    def effects(self) -> dict[int, list[int]]:
        """By position, the positions of the records that follow from it."""
        return effects_of(self.causes)

    @cached_property
    def answer(self) -> Answer:
        """Its valid answer."""
        with self._lock:
            return media.answer_of(self.history, self.request_id)

    @cached_property
    def made(self) -> list[MadeMedium]:
        """The media of its answer."""
        return media.made(self.answer)

    @cached_property
    def begin_ns(self) -> int:
        """The time that all times of the screens count from: the submission, or the first record."""
        subject = self.history.subjects.request(self.request_id)
        records = self.history.records
        found = next((record for record in records if record.subject == subject), records[0])
        return found.time_ns

    @property
    def has_ended(self) -> bool:
        """True if nothing will be added to the history."""
        return self.explanation is not None and self.explanation.facts.end is not None

    # ---- screens -------------------------------------------------------------------------------------
    def request(self) -> dict[str, Any]:
        """The request: its way through the system, and its answer."""
        head = {
            "request_id": self.request_id,
            "parts_of_request": self.history.requests,
            "begin": iso(self.begin_ns),
            "begin_ns": str(self.begin_ns),
            "records": len(self.history.records),
            "redacted": self.history.is_redacted,
            "damaged": self.history.damaged.get(self.request_id),
            "ended": self.has_ended,
        }
        one = self.explanation
        if one is None:
            return head | {"explained": None, "lanes": [], "output": None, "prompt": None}
        submission = one.facts.submission
        return head | {
            "explained": report.as_plain(one),
            "remarks": report.remarks(one),
            "title": report.title(one),
            "lanes": lanes.lanes_of(one, self.history),
            "output": lanes.output_of(self.answer, self.begin_ns),
            "media": [media.plain(number, medium, self.begin_ns) for number, medium in enumerate(self.made)],
            "prompt": prompt_of(submission.inputs) if submission is not None else None,
            "model": submission.model if submission is not None else None,
            "tenant": submission.tenant if submission is not None else None,
            "forked_from": msgspec.to_builtins(submission.forked_from) if submission is not None else None,
        }

    def events(self, start: int, kind: str, text: str, count: int = PAGE) -> dict[str, Any]:
        """A page of the events, from the number `start` of those that match.

        Args:
            start: a number from 0.
            kind: an event type, or empty for all.
            text: a part of the type, writer or description, in any case; or empty.
            count: of events on the page, at most.
        """
        rows, wanted = self._rows, text.casefold()
        chosen = [
            row for row in rows if (not kind or row["type"] == kind) and (not wanted or _has(row, wanted))
        ]
        kinds: dict[str, int] = {}
        for row in rows:
            kinds[row["type"]] = kinds.get(row["type"], 0) + 1
        return {"total": len(chosen), "start": start, "kinds": kinds, "rows": chosen[start : start + count]}

    @cached_property
    def _rows(self) -> list[dict[str, Any]]:
        with self._lock:
            return [self._row(record) for record in self.history.records]

    def _row(self, record: StoredRecord) -> dict[str, Any]:
        effects = self.effects.get(record.seq, [])
        return {
            "seq": record.seq,
            "t": (record.time_ns - self.begin_ns) / 1e9,
            "cause": self.causes.get(record.seq),
            "effects": effects[:_SHOWN_EFFECTS],
            "more_effects": max(0, len(effects) - _SHOWN_EFFECTS),
            "bytes": len(record.data),
            **self._described(record),
        }

    def _described(self, record: StoredRecord) -> dict[str, Any]:
        address = self.history.subjects.parse(record.subject)
        request_id = address.request_id if address is not None else None
        try:
            event = decode(record.data, address.kind if address else None)
        except MalformedEventError as error:
            return {"type": "unreadable", "writer": "?", "text": str(error), "request": request_id}
        return {
            "type": type_of(event),
            "writer": writer_of(event),
            "text": summary_of(event),
            "request": request_id,
        }

    def event(self, seq: int) -> dict[str, Any]:
        """One event with all its values.

        Raises:
            ClientError: the history has no such record.
        """
        place = self.place_of(seq)
        record = self.history.records[place]
        address = self.history.subjects.parse(record.subject)
        try:
            found: Any = _shown(msgspec.to_builtins(decode(record.data, address.kind if address else None)))
        except MalformedEventError:
            found = None
        raw = record.data[:_SHOWN_BYTES].hex()
        head = {"place": place, "subject": record.subject, "time": iso(record.time_ns)}
        return head | self._row(record) | {"event": found, "raw": raw if found is None else None}

    def state(self, place: int) -> dict[str, Any]:
        """The state after a record, by its number from 0, and what the record changed."""
        positions = self.timeline.positions
        place = min(max(place, 0), len(positions) - 1)
        before = place - 1 if place else None
        state = self.timeline.state(place)
        changes = self.timeline.difference(before, place) if before is not None else []
        row = self._row(positions[place].record)
        return {
            "place": place,
            "count": len(positions),
            "row": row,
            "state": _shown(state, _SHOWN_OF_STATE),
            "changes": _shown(msgspec.to_builtins(changes), _SHOWN_OF_STATE),
        }

    def changes(self, name: str) -> dict[str, Any]:
        """The changes of one value of the state, from the first on."""
        found = list(islice(self.timeline.changes(name), _SHOWN_CHANGES + 1))
        return {
            "name": name,
            "more": len(found) > _SHOWN_CHANGES,
            "changes": [
                {
                    "place": place,
                    "seq": self.timeline.positions[place].record.seq,
                    "before": _shown(change.before, _SHOWN_OF_STATE),
                    "after": _shown(change.after, _SHOWN_OF_STATE),
                    "text": self._described(self.timeline.positions[place].record)["text"],
                    "type": self._described(self.timeline.positions[place].record)["type"],
                }
                for place, change in found[:_SHOWN_CHANGES]
            ],
        }

    def decisions(self) -> dict[str, Any]:
        """The recorded decisions beside those that are made again."""
        return dict(_shown(decisions_of(self.history, self.timeline, self.causes, self.begin_ns)))

    def place_of(self, seq: int) -> int:
        """Return the number of a record, from 0.

        Raises:
            ClientError: the history has no such record.
        """
        place = self._places.get(seq)
        if place is None:
            raise ClientError(f"the history of {self.request_id!r} has no record {seq}")
        return place

    @cached_property
    def _places(self) -> dict[int, int]:
        return {record.seq: place for place, record in enumerate(self.history.records)}


_SHOWN_EFFECTS: Final = 4
_MAX_EXACT: Final = (1 << 53) - 1
"""The largest whole number that a browser's numbers hold."""


def _has(row: dict[str, Any], wanted: str) -> bool:
    return any(wanted in str(row[name]).casefold() for name in ("type", "writer", "text", "seq"))


def _shown(value: Any, chars: int = _SHOWN_CHARS) -> Any:
    """A value as JSON that a browser reads exactly: long texts are cut, large numbers are texts."""
    match value:
        case dict():
            return {str(name): _shown(item, chars) for name, item in value.items()}
        case list() | tuple():
            return [_shown(item, chars) for item in value]
        case int() if abs(value) > _MAX_EXACT:
            return str(value)
        case str() if len(value) > chars:
            return f"{value[:chars]}… {len(value):,} characters in all"
        case _:
            return value


Computation = Callable[[Study], Any]
"""What a screen asks of a study."""
