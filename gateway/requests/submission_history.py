"""One request's records on the log except its output: for a client that attaches to the request."""

from gateway.requests.relay import RequestForgottenError
from shared.errors import ClientError
from shared.events import (
    MalformedEventError,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestRejected,
    RequestSubmitted,
    decode,
)
from shared.log.port import StoredRecord
from shared.subject_rules import check_event_subject
from shared.subjects import Subjects


class RequestConflictError(ClientError):
    """The id belongs to another request."""

    code = "request_id_conflict"
    status = 409


class SubmissionHistory:
    """A fold over the records on `subjects`; pure.

    Attributes:
        submitted: the first submission that is well formed, as the conductor takes it: its position, the time
            it was stored, and the event.
        control: the records on the request's control subject.
    """

    def __init__(self, request_id: str, subjects: Subjects) -> None:
        self.submitted: tuple[int, int, RequestSubmitted] | None = None
        self.control: list[StoredRecord] = []
        self.has_ended = False
        self._request_id = request_id
        self._subjects = subjects
        self._is_taken = False

    @property
    def subjects(self) -> list[str]:
        """The subjects to read."""
        subjects = self._subjects
        return [kind(self._request_id) for kind in (subjects.request, subjects.control, subjects.walk)]

    def fold(self, record: StoredRecord) -> None:
        """Apply one record, in log order."""
        address = self._subjects.parse(record.subject)
        if address is None:
            return
        if address.kind == "control":
            self.control.append(record)
            return
        self._is_taken = self._is_taken or address.kind == "request"
        try:
            event = decode(record.data, address.kind)  # a plain service may leave the tag out
            check_event_subject(address, event)
        except MalformedEventError:
            return
        match event:
            case RequestSubmitted() if self.submitted is None:
                self.submitted = record.seq, record.time_ns, event
            case RequestFinished() | RequestFailed() | RequestCancelled():
                self.has_ended = True
            case RequestRejected() if self.submitted is not None:
                self.has_ended = self.has_ended or event.submission_seq == self.submitted[0]

    def missing(self) -> ClientError:
        """The error for a history without a submission."""
        if not self._is_taken:
            return RequestForgottenError(self._request_id)
        return RequestConflictError(
            f"request_id {self._request_id!r} is taken by a malformed message; choose another id"
        )
