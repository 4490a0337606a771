"""The records of processes that affected a request: of its ranks, and of conductors, while it was open.

Pure: a fold over a request's records, and those of workers and epochs, in log order.
"""

from shared.events import (
    EpochOpened,
    MalformedEventError,
    NodeReady,
    RequestAdmitted,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestRejected,
    RequestResumed,
    RequestSubmitted,
    WorkerJoined,
    WorkerLeaving,
    WorkerLost,
)
from shared.log.port import StoredRecord
from shared.subject_rules import read_event
from shared.subjects import Subjects

_ENDS = (RequestFinished, RequestFailed, RequestCancelled, RequestRejected)


class RequestLives:
    """Tells which records belong to the story of a request."""

    def __init__(self, subjects: Subjects) -> None:
        self._subjects = subjects
        self._ranks: set[int] = set()
        self._submission_seq = 0
        self._has_ended = False

    def shows(self, record: StoredRecord) -> bool:
        """Fold a record; return whether it is the request's, or of a process that affected it."""
        address = self._subjects.parse(record.subject)
        try:
            _, event = read_event(record, self._subjects)
        except MalformedEventError:
            return address is None or not address.is_membership
        assert address is not None
        if not address.is_membership:
            if isinstance(event, RequestSubmitted):
                self._submission_seq = self._submission_seq or record.seq
            is_duplicate = isinstance(event, RequestRejected) and event.submission_seq != self._submission_seq
            self._has_ended |= isinstance(event, _ENDS) and not is_duplicate
            if isinstance(event, NodeReady):
                self._ranks |= {event.rank, *event.placement.values()}
            elif isinstance(event, RequestAdmitted | RequestResumed):
                self._ranks |= set(event.placement.values())
            return True
        if not self._submission_seq or self._has_ended:
            return False
        match event:
            case EpochOpened():
                return True
            case WorkerJoined() | WorkerLost() | WorkerLeaving():
                # Before its admission, a request may wait for any rank.
                return not self._ranks or event.rank in self._ranks
            case _:
                return False
