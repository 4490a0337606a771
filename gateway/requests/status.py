"""The status of a request by the log, and how a client that is not its reader cancels it.

Any gateway can answer, because the log has everything. A request for several answers is several requests on
the log (`gateway.requests.choices`); here they are one, and are cancelled together.

Log order decides if a cancel came in time, and the conductor publishes the decision, usually at once. Without
a conductor the request stays `cancelling`, and ends later one way or the other.

A request that the log has forgotten is distinguished from one that never existed as far as that can be known:
the log still holds something of it, a gateway generated its id before the log's oldest record, or this
gateway has recently seen a decision about it.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import aclosing, asynccontextmanager
from typing import Any, Final, Literal, TypeAlias

import msgspec

from gateway.requests.relay import RequestForgottenError
from gateway.requests.request_ids import RecentIds, is_forgotten
from gateway.requests.usage import usage_object
from shared.epoch_fence import EpochFence
from shared.errors import ClientError
from shared.events import (
    AnyEvent,
    Failure,
    MalformedEventError,
    RequestAdmitted,
    RequestCancel,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestRejected,
    RequestResumed,
    RequestSubmitted,
    Usage,
    decode,
    encode,
    is_answer_of_server,
)
from shared.ids import RequestId
from shared.log.port import Log, LogUnavailableError, StoredRecord
from shared.request_output import writers_of
from shared.subject_rules import check_event_subject
from shared.subjects import Subjects

CANCEL_S: Final = 2.0
"""The time to wait for the conductor's decision about a cancel; after it the status is `cancelling`."""
LOG_S: Final = 5.0
"""The time limit of the log for a read or an ack."""
Status: TypeAlias = Literal["waiting", "running", "cancelling", "finished", "cancelled", "failed", "rejected"]
ENDED: Final = frozenset({"finished", "cancelled", "failed", "rejected"})
_ENDS: Final = RequestFinished | RequestFailed | RequestCancelled


class UnknownRequestError(ClientError):
    """The log holds no request with this id."""

    code = "request_not_found"
    status = 404

    def __init__(self, request_id: str) -> None:
        super().__init__(
            f"the log holds no request {request_id!r}: expected the id of an answer that it has not forgotten"
        )


class RequestEndedError(ClientError):
    """The request has ended, so it cannot be cancelled."""

    code = "request_ended"
    status = 409

    def __init__(self, request_id: str, status: str) -> None:
        super().__init__(f"request {request_id!r} cannot be cancelled: it is {status} already")


class PartStatus(msgspec.Struct, kw_only=True):
    """The status of one request on the log.

    Attributes:
        seq: the position of its submission; None without one. The submission may be malformed; then there is
            no event, and the conductor rejects it.
        is_known: a conductor decided something about it, so it was submitted.
        is_deleted: a client has deleted its output.
        writers: those that may write its output by the latest placement, as `w<rank>`.
    """

    id: str
    seq: int | None = None
    submitted_ns: int = 0
    ended_ns: int | None = None
    event: RequestSubmitted | None = None
    status: Status = "waiting"
    is_known: bool = False
    is_deleted: bool = False
    writers: tuple[str, ...] = ()
    finish_reason: str | None = None
    usage: Usage | None = None
    failure: Failure | None = None

    def fold(self, record: StoredRecord, event: AnyEvent) -> None:
        """Apply one event, in log order."""
        if isinstance(event, RequestSubmitted):
            if self.event is None:
                self.event, self.seq, self.submitted_ns = event, record.seq, record.time_ns
                self.status, self.failure, self.ended_ns = "waiting", None, None
            return
        self.is_known = self.is_known or isinstance(event, RequestAdmitted | _ENDS)
        self.is_deleted = self.is_deleted or (isinstance(event, RequestCancel) and event.deletes)
        if self.seq is None or self.status in ENDED:
            return
        if isinstance(event, RequestAdmitted | RequestResumed):
            self.writers = tuple(writers_of(event))
        match event:
            case RequestAdmitted() if self.status == "waiting":
                self.status = "running"
            case RequestCancel():
                self.status = "cancelling"
            case RequestFinished():
                self.status, self.usage = "finished", event.usage
                self.finish_reason = event.finish_reasons[0] if event.finish_reasons else None
            case RequestFailed():
                self.status, self.failure = "failed", event.failure
            case RequestCancelled():
                self.status = "cancelled"
            case RequestRejected() if event.submission_seq == self.seq:
                self.status, self.failure = "rejected", event.failure
            case _:
                return
        if self.status in ENDED:
            self.ended_ns = record.time_ns

    def fold_malformed(self, record: StoredRecord) -> None:
        """Apply a submission that cannot be read. A well-formed one after it takes its place."""
        if self.seq is None:
            self.seq, self.submitted_ns = record.seq, record.time_ns

    def document(self) -> dict[str, Any]:
        """The JSON object for clients."""
        usage, failure = self.usage, self.failure
        return {
            "id": self.id,
            "status": self.status,
            "created": self.submitted_ns // 10**9,
            "ended": None if self.ended_ns is None else self.ended_ns // 10**9,
            "finish_reason": self.finish_reason,
            "usage": None if usage is None else usage_object(usage),
            "error": None if failure is None else {"code": failure.code, "message": failure.message},
        }


class StatusFold:
    """The statuses of several requests: a fold over their records in log order; pure.

    Attributes:
        parts: the statuses by request id.
        seq: the position of the last record that was folded.
    """

    def __init__(self, subjects: Subjects, request_ids: Iterable[str]) -> None:
        self.parts = {one: PartStatus(id=one) for one in request_ids}
        self.seq = 0
        self._subjects = subjects
        self._fence = EpochFence()

    @property
    def watched(self) -> list[str]:
        """The subjects of the records that count."""
        subjects = self._subjects
        kinds = (subjects.request, subjects.control, subjects.walk)
        return [subjects.epoch, *(kind(one) for one in self.parts for kind in kinds)]

    async def read(self, log: Log) -> None:
        """Fold what the log has now.

        Raises:
            LogUnavailableError: the log does not answer.
        """
        if not log.connected:
            raise LogUnavailableError("the log does not answer; try again")
        async with aclosing(log.history(self.watched)) as records:
            async for record in records:
                self.fold(record)

    def fold(self, record: StoredRecord) -> None:
        """Apply one record."""
        self.seq = record.seq
        address = self._subjects.parse(record.subject)
        if address is None:
            return
        try:
            event = decode(record.data, address.kind)
            check_event_subject(address, event)
        except MalformedEventError:
            # The conductor rejects it, if it is a submission and not a misdirected reply of the server.
            if address.kind == "request" and not is_answer_of_server(record.data):
                self.parts[str(address.request_id)].fold_malformed(record)
            return
        if self._fence.admits(event) and address.request_id is not None:
            self.parts[address.request_id].fold(record, event)


class RecordedRequest:
    """A request with all its parts (one for each choice): a fold over their records."""

    def __init__(self, log: Log, subjects: Subjects, request_id: RequestId, recent_ids: RecentIds) -> None:
        self.id = request_id
        self._recent_ids = recent_ids
        self._log = log
        self._subjects = subjects
        self._fold = StatusFold(subjects, [request_id])

    @property
    def parts(self) -> dict[str, PartStatus]:
        """The statuses of the parts, by their ids."""
        return self._fold.parts

    @property
    def status(self) -> Status:
        """The status of the whole: that of the least advanced part, or else the worst end."""
        found = {part.status for part in self.parts.values()}
        order: tuple[Status, ...] = (
            "waiting", "running", "cancelling", "failed", "rejected", "cancelled", "finished",
        )  # fmt: skip
        return next(status for status in order if status in found)

    async def read(self) -> None:
        """Read the request from the log.

        Raises:
            UnknownRequestError: the log holds nothing of it.
            RequestForgottenError: the log holds its end at most.
            LogUnavailableError: the log does not answer.
        """
        async with log_timeout():
            await self._read()

    async def _read(self) -> None:
        await self._fold.read(self._log)
        submitted = self.parts[self.id].event
        if submitted is None:
            if self.parts[self.id].seq is not None:
                return  # it is malformed, and has no parts
            if self.parts[self.id].is_known or self.id in self._recent_ids:
                raise RequestForgottenError(self.id)
            if is_forgotten(self.id, await self._log.state()):
                raise RequestForgottenError(self.id)
            raise UnknownRequestError(self.id)
        if submitted.parts > 1 and submitted.parent in {None, self.id}:
            ids = [self.id, *(f"{self.id}-{number}" for number in range(1, submitted.parts))]
            self._fold = StatusFold(self._subjects, ids)
            await self._fold.read(self._log)
            self._fold.parts = {one: part for one, part in self.parts.items() if self._is_ours(part)}

    async def cancel(self, cancelled: Callable[[str], RequestCancel]) -> None:
        """Cancel the parts that have not ended, and wait up to `CANCEL_S` for their end.

        `cancelled` makes the event for an id.

        Raises:
            LogUnavailableError: the log does not answer.
        """
        async with log_timeout():
            for part in self.parts.values():
                if part.status not in ENDED:
                    await self._log.publish(self._subjects.control(part.id), encode(cancelled(part.id)))
        try:
            async with (
                asyncio.timeout(CANCEL_S),
                aclosing(self._log.read(self._fold.watched, self._fold.seq + 1)) as records,
            ):
                while self.status not in ENDED:
                    self._fold.fold(await anext(records))
        except TimeoutError:
            return

    def document(self) -> dict[str, Any]:
        """The JSON object for clients."""
        first = self.parts[self.id]
        model, correlation = (first.event.model, first.event.correlation) if first.event else (None, None)
        about = {"object": "request", "model": model, "correlation": correlation}
        if len(self.parts) == 1:
            return {**first.document(), **about}
        parts = [part.document() for part in self.parts.values()]
        return {**self._whole().document(), **about, "parts": parts}

    def _whole(self) -> PartStatus:
        """All parts as one: ends with the last, fails as the first that did, counts each prompt once."""
        first, parts = self.parts[self.id], list(self.parts.values())
        whole = PartStatus(id=self.id, submitted_ns=first.submitted_ns, status=self.status)
        if self.status in ENDED:
            whole.ended_ns = max(part.ended_ns or 0 for part in parts)
            whole.failure = next((part.failure for part in parts if part.status == self.status), None)
        if self.status == "finished":
            whole.finish_reason = first.finish_reason
            whole.usage = Usage(
                prompt_tokens=sum(
                    part.usage.prompt_tokens for part in parts if part.usage and _counts_prompt(part)
                ),
                completion_tokens=sum(part.usage.completion_tokens for part in parts if part.usage),
            )
        return whole

    def _is_ours(self, part: PartStatus) -> bool:
        """True if it was submitted as a part of this request, and not merely under such an id."""
        return part.event is not None and self.id in {part.id, part.event.parent}


def _counts_prompt(part: PartStatus) -> bool:
    """True for the first choice of its prompt."""
    return part.event is not None and part.event.params.choice == 0


@asynccontextmanager
async def log_timeout() -> AsyncIterator[None]:
    """Turn a log that does not answer within `LOG_S` into its error."""
    try:
        async with asyncio.timeout(LOG_S):
            yield
    except TimeoutError as error:
        raise LogUnavailableError(f"the log did not answer within {LOG_S:g} s; try again") from error
