"""The requests of a log or a bundle, and the choice of those that the gate looks at. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

from dalsegno.history.event_description import type_of
from dalsegno.history.summary import Summary
from shared.epoch_fence import EpochFence
from shared.errors import ClientError
from shared.events import AnyEvent, MalformedEventError, RequestAdmitted, RequestSubmitted, decode
from shared.ids import is_addressable
from shared.log.port import StoredRecord
from shared.subject_rules import check_event_subject
from shared.subjects import Subjects

_SKIPPED: Final = frozenset({"edge"})
"""Kinds of subjects of which only the number of records is of interest: they are many."""


@dataclass(slots=True, kw_only=True)
class Seen:
    """A request in a source.

    Attributes:
        summary: its outcome; None if its submission is not in the log any more.
        layout: its placement when it was admitted (`layout_of`).
        config: the digest of the configuration that admitted it; empty if it was not.
        types: the types of its events.
    """

    source: str
    request_id: str
    seq: int
    time_ns: int
    summary: Summary | None = None
    family: str = ""
    layout: str = ""
    config: str = ""
    types: set[str] = field(default_factory=set)

    @property
    def outcome(self) -> str:
        return "expired" if self.summary is None else self.summary.outcome

    @property
    def key(self) -> tuple[str, str]:
        return self.source, self.request_id

    @property
    def kind(self) -> tuple[str, str, str, str]:
        """Outcome, code, family and layout; a sample contains requests of each kind."""
        code = self.summary.code if self.summary is not None else None
        return self.outcome, code or "", self.family, self.layout


@dataclass(slots=True, kw_only=True)
class Contents:
    """The requests of a source, and the types of the events that belong to none."""

    requests: dict[str, Seen] = field(default_factory=dict)
    types: set[str] = field(default_factory=set)


def contents(records: Iterable[StoredRecord], subjects: Subjects, source: str) -> Contents:
    """Find the requests in the records of a log or a bundle."""
    found, fence = Contents(), EpochFence()
    for record in records:
        address = subjects.parse(record.subject)
        if address is None:
            continue
        event: AnyEvent | None = None
        if address.kind not in _SKIPPED:
            try:
                event = decode(record.data, address.kind)
                check_event_subject(address, event)
            except MalformedEventError:
                event = None
        if event is not None and not fence.admits(event):
            continue
        if address.request_id is None:
            if event is not None:
                found.types.add(type_of(event))
            continue
        if is_addressable(str(address.request_id)):
            _take(
                found, record, str(address.request_id), event, source, is_submission=address.kind == "request"
            )
    return found


def _take(
    found: Contents,
    record: StoredRecord,
    request_id: str,
    event: AnyEvent | None,
    source: str,
    *,
    is_submission: bool,
) -> None:
    seen = found.requests.get(request_id)
    if seen is None:
        seen = found.requests[request_id] = Seen(
            source=source, request_id=request_id, seq=record.seq, time_ns=record.time_ns
        )
    if is_submission:
        _submit(seen, record, event)
    if event is None:
        return
    seen.types.add(type_of(event))
    if seen.summary is not None:
        seen.summary.take(event, record.time_ns)
    if isinstance(event, RequestAdmitted):
        seen.family, seen.config = event.family, event.pins.config
        seen.layout = layout_of(event.placement, event.walk_placement)


def _submit(seen: Seen, record: StoredRecord, event: AnyEvent | None) -> None:
    """Note a submission: the first readable one owns the id."""
    model = event.model if isinstance(event, RequestSubmitted) else None
    if seen.summary is not None and (seen.summary.model is not None or model is None):
        return
    seen.seq, seen.time_ns = record.seq, record.time_ns
    seen.summary = Summary(request_id=seen.request_id, model=model, seq=record.seq, start_ns=record.time_ns)


def layout_of(placement: dict[str, int], walk_placement: dict[str, dict[str, int]]) -> str:
    """A placement in words: `llm 0, prepare 0; decode: llm 2`."""
    parts = [_nodes(placement)]
    parts += [f"{walk}: {_nodes(nodes)}" for walk, nodes in sorted(walk_placement.items())]
    return "; ".join(parts)


def _nodes(placement: dict[str, int]) -> str:
    return ", ".join(f"{node} {rank}" for node, rank in sorted(placement.items()))


# ---- the choice ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A range of submissions: by position in the log, or by time. None is open."""

    first_seq: int | None = None
    last_seq: int | None = None
    first_ns: int | None = None
    last_ns: int | None = None

    def has(self, seen: Seen) -> bool:
        return (
            (self.first_seq is None or seen.seq >= self.first_seq)
            and (self.last_seq is None or seen.seq <= self.last_seq)
            and (self.first_ns is None or seen.time_ns >= self.first_ns)
            and (self.last_ns is None or seen.time_ns <= self.last_ns)
        )


def window(text: str) -> Window:
    """Read `FROM..TO`: log positions, or times as in `2027-01-31T08:00`; UTC without a zone, and either open.

    Raises:
        ClientError: it is neither.
    """
    begin, dots, end = text.partition("..")
    if not dots or not (begin or end):
        raise ClientError(
            f"expected FROM..TO, log positions or times, one of them may be left out; found {text!r}"
        )
    ends = [_end(one, text) for one in (begin, end)]
    (first_seq, first_ns), (last_seq, last_ns) = ends
    return Window(first_seq=first_seq, last_seq=last_seq, first_ns=first_ns, last_ns=last_ns)


def _end(text: str, whole: str) -> tuple[int | None, int | None]:
    if not text:
        return None, None
    if text.isdecimal() and text.isascii():
        return int(text), None
    try:
        at = datetime.fromisoformat(text)
    except ValueError as error:
        raise ClientError(
            f"{text!r} in {whole!r}: expected a log position, or a time as in 2027-01-31T08:00: {error}"
        ) from error
    return None, round((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() * 1_000_000_000)


def chosen(
    seen: Sequence[Seen], *, last: int | None = None, within: Window | None = None, sample: int | None = None
) -> list[Seen]:
    """Choose requests.

    Args:
        seen: the requests of all sources.
        last: the newest ones by time of submission.
        within: those that were submitted within a window. A request whose submission has expired is not
            within any, and is none of the newest either.
        sample: so many of each outcome, code, family and layout, spread evenly over time.
    """
    found = sorted(seen, key=lambda one: (one.time_ns, one.seq))
    if within is not None or last is not None or sample is not None:
        found = [one for one in found if one.summary is not None]
    if within is not None:
        found = [one for one in found if within.has(one)]
    if last is not None:
        found = found[-last:]
    if sample is not None:
        kinds: dict[tuple[str, str, str, str], list[Seen]] = {}
        for one in found:
            kinds.setdefault(one.kind, []).append(one)
        keys = {one.key for members in kinds.values() for one in _spread(members, sample)}
        found = [one for one in found if one.key in keys]
    return found


def _spread(members: list[Seen], count: int) -> list[Seen]:
    """`count` of them at equal distances, the newest among them."""
    if len(members) <= count:
        return members
    return [members[len(members) - 1 - number * len(members) // count] for number in range(count)]
