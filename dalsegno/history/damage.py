"""The requests that may lack records, because records of their log are missing. Pure.

A lost record does not say whose it was. So a request is damaged if a range of missing records touches the
time from its submission to its end.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from shared.events import (
    MalformedEventError,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestRejected,
    decode,
)
from shared.log.port import MissingRecords, StoredRecord
from shared.subjects import Subjects

_ENDS = (RequestFinished, RequestFailed, RequestCancelled, RequestRejected)


@dataclass(slots=True)
class _Extent:
    first_seq: int
    last_seq: int = 0
    has_ended: bool = False


@dataclass(slots=True)
class Damage:
    """The damaged requests among those whose records it is given, in order."""

    missing: tuple[MissingRecords, ...]
    subjects: Subjects
    _extents: dict[str, _Extent] = field(default_factory=dict)

    def take(self, record: StoredRecord) -> None:
        """Note a record of the log."""
        address = self.subjects.parse(record.subject) if self.missing else None
        if address is None or address.request_id is None:
            return
        extent = self._extents.setdefault(str(address.request_id), _Extent(record.seq))
        extent.last_seq = record.seq
        if address.kind == "walk" and not extent.has_ended:
            try:
                extent.has_ended = isinstance(decode(record.data, address.kind), _ENDS)
            except MalformedEventError:
                return

    def of(self, requests: Iterable[str]) -> dict[str, str]:
        """Return the damaged ones of these requests, each with the reason."""
        return {request_id: why for request_id in requests if (why := self._why(request_id))}

    def _why(self, request_id: str) -> str:
        extent = self._extents.get(request_id)
        for one in self.missing:
            if extent is None or (
                one.last_seq > extent.first_seq and (one.first_seq < extent.last_seq or not extent.has_ended)
            ):
                return f"its log is damaged, and may lack records of it: {one}"
        return ""


def described(missing: Iterable[MissingRecords]) -> str:
    """Return all missing records in one text."""
    return "; ".join(map(str, missing))
