"""Submitting: a request becomes one event, or attaches to the existing request with its id.

The event is published with expected sequence 0, so that an id is executed once. If the id is taken, the same
model, inputs and parameters attach to the original, however old it is; anything else is a conflict. Nothing
is promised before the log's ack. `gateway.requests.readers` decides who reads a request, and who may cancel
it.

The log forgets its oldest records. A request that it has forgotten is gone as a whole, because a submission
precedes all that followed from it. A client that has a part of such an answer gets an error; the request is
not executed again.

A submission outlives its client, because an event that was sent may be stored. If the client leaves
meanwhile, the cancel is published after the ack. If the log does not answer in time, the client gets 503, and
the submission is cancelled in the same way, unless the client chose the id: it may ask again under that id,
and then gets the answer.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from gateway.requests.readers import ReaderRegistry, Readers
from gateway.requests.relay import AnswerItem, RecordRouter, Relay
from gateway.requests.request_ids import is_forgotten, is_generated
from gateway.requests.submission_history import RequestConflictError, SubmissionHistory
from shared import faults
from shared.errors import ClientError, DalSegnoError
from shared.events import RequestSubmitted, check_public, encode, submission_digest
from shared.log.capacity_watch import CapacityWatch
from shared.log.port import Durability, Log, LogUnavailableError, WrongLastSequenceError
from shared.subjects import Subjects
from shared.telemetry.log_fields import PROMPT, client_correlation
from shared.telemetry.tracing import valid_traceparent

if TYPE_CHECKING:  # the NATS client uses this module without an HTTP server
    from gateway.requests.parsed_request import ParsedRequest

_LOGGER: Final = logging.getLogger(__name__)
ACCEPT_S: Final = 5.0
"""The time limit of the log's ack, after which the client gets 503."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmissionRecord:
    """The facts about a request that are known before its answer begins; `created_s` counts from 1970."""

    created_s: int
    durability: Durability


class Subscription:
    """One client's subscription to one request's answer.

    Attributes:
        recorded: the facts about the request, once it is stored.
        is_attached: the request was submitted before.
    """

    def __init__(
        self, relay: Relay, readers: Readers, release: Callable[["Subscription", str, float], None]
    ) -> None:
        self.relay = relay
        self.readers = readers
        self.recorded: SubmissionRecord | None = None
        self.is_attached = False
        self._release = release
        self._is_held = True

    def items(self) -> AsyncGenerator[AnswerItem, None]:
        """The answer."""
        return self.relay.items()

    def release(self, cancel: str = "", *, grace_s: float = 0.0) -> None:
        """End the subscription; a second call does nothing.

        With a reason to `cancel`, the request ends if it has no other reader, but only `grace_s` seconds
        later, and not if a client asked for it again by then.
        """
        if self._is_held:
            self._is_held = False
            self._release(self, cancel, grace_s)


class Submissions:
    """The requests that this gateway submits or attaches to, on one log."""

    def __init__(
        self,
        log: Log,
        subjects: Subjects,
        origin: str,
        router: RecordRouter,
        tasks: asyncio.TaskGroup,
        numbers: Iterator[int],
        room: CapacityWatch,
        max_unread: int = 512,
    ) -> None:
        self.readers = ReaderRegistry(log, subjects, origin, tasks, numbers, max_unread)
        self._log = log
        self._subjects = subjects
        self._origin = origin
        self._router = router
        self._tasks = tasks
        self._numbers = numbers
        self._room = room

    async def submit(
        self, request: "ParsedRequest", on_subscribed: Callable[[Subscription], object]
    ) -> Subscription:
        """Submit a request, or attach to the one with its id.

        `on_subscribed` gets the subscription before anything is awaited: a caller that is cancelled
        releases it, and alone knows the reason.

        Raises:
            ClientError: the request cannot be an event (too large, not text), its id is another request's, or
                the log has forgotten it.
            CapacityError: the log is unavailable or full, or did not ack in time.
        """
        if not (self._log.connected and self._room.is_responsive):
            raise LogUnavailableError("the log does not answer; the request was not taken, try again")
        event = self._event(request)
        data = encode_or_refuse(event)
        relay = self._router.open(request.request_id)
        readers = self.readers.enter(request.request_id, request.parent or request.request_id)
        subscription = Subscription(relay, readers, self._released)
        on_subscribed(subscription)
        try:
            async with asyncio.timeout(ACCEPT_S):
                is_new = await self._may_be_new(request) and await self._is_stored(subscription, event, data)
                if not is_new:
                    await self._attach(subscription, event)
                return subscription
        except TimeoutError as error:
            subscription.release("" if request.id_is_chosen else "the log did not take it in time")
            raise LogUnavailableError(
                f"the log did not answer within {ACCEPT_S:g} s; the request was not taken, try again"
            ) from error
        except DalSegnoError:
            subscription.release()
            raise

    def _released(self, subscription: Subscription, cancel: str, grace_s: float) -> None:
        self._router.close(subscription.relay)
        readers = subscription.readers
        readers.has_ended = readers.has_ended or subscription.relay.output.ended
        self.readers.leave(readers, cancel, grace_s)

    # ---- new requests --------------------------------------------------------------------------------
    async def _may_be_new(self, request: "ParsedRequest") -> bool:
        """False for a request that must exist already: its client resumes it, or the log has forgotten it.

        Raises:
            LogFullError: the log has no room for a new request.
        """
        if request.is_resumed:
            return False
        if self._room.reason:
            subject = self._subjects.request(request.request_id)
            if request.id_is_chosen and await self._log.last(subject) is not None:
                return False
            self._room.require_capacity()
        may_be_old = request.id_is_chosen and is_generated(request.request_id)
        return not (may_be_old and is_forgotten(request.request_id, await self._log.state()))

    async def _is_stored(self, subscription: Subscription, event: RequestSubmitted, data: bytes) -> bool:
        """Publish the event, also if the caller is cancelled meanwhile; False if its id is taken."""
        subscription.readers.publishing += 1
        storing = self._tasks.create_task(self._store(subscription, event, data), name=f"submit {event.id}")
        await asyncio.wait({storing})  # it continues if this wait is cancelled
        if storing.cancelled():
            raise LogUnavailableError("this gateway lost its log; try again")
        outcome = storing.result()
        if outcome is not None and not isinstance(outcome, WrongLastSequenceError):
            raise outcome
        return outcome is None

    def _event(self, request: "ParsedRequest") -> RequestSubmitted:
        number = next(self._numbers)
        return RequestSubmitted(
            id=f"{self._origin}.{number}",
            writer=self._origin,
            number=number,
            request_id=request.request_id,
            model=request.model,
            inputs=request.inputs,
            params=request.params,
            origin=self._origin,
            trace=valid_traceparent(request.trace),
            parent=request.parent,
            parts=request.parts,
            part=request.part,
            correlation=client_correlation(),
            timeout_s=request.timeout_s,
            priority=request.priority,
            tenant=request.tenant,
            created_s=request.created_s,
            is_first=True,
            api_fields=request.api_fields,
        )

    async def _store(
        self, subscription: Subscription, event: RequestSubmitted, data: bytes
    ) -> DalSegnoError | None:
        """Publish; return the error, if any."""
        readers = subscription.readers
        try:
            subject = self._subjects.request(readers.request_id)
            faults.reach("gateway.submission.publishing")
            seq = await self._log.publish(subject, data, expected_last_seq=0, waits_while_full=False)
            faults.reach("gateway.submission.acked")
        except DalSegnoError as error:
            return error
        else:
            readers.may_cancel = True
            subscription.recorded = self._recorded(event.created_s or 0)
            subscription.relay.submitted_at(seq)
            _LOGGER.info(
                "request %s asks %r with %r", event.request_id, event.inputs, event.params, extra=PROMPT
            )
            return None
        finally:
            readers.publishing -= 1
            self.readers.settle(readers)

    def _recorded(self, created_s: int) -> SubmissionRecord:
        return SubmissionRecord(created_s=created_s, durability=self._log.durability)

    # ---- existing requests ---------------------------------------------------------------------------
    async def _attach(self, subscription: Subscription, event: RequestSubmitted) -> None:
        """Subscribe to the existing request with the event's id, from its beginning.

        The relay is a new one: the first may have received records from the middle of the answer.

        Raises:
            RequestConflictError: the existing request is another one.
            RequestForgottenError: the log holds no such request any more.
        """
        self._router.close(subscription.relay)
        request_id = subscription.readers.request_id
        history = SubmissionHistory(request_id, self._subjects)
        async with aclosing(self._log.history(history.subjects)) as records:
            async for record in records:
                history.fold(record)
        for record in history.control:
            subscription.readers.others.fold(record)
        if history.submitted is None:
            raise history.missing()
        seq, time_ns, original = history.submitted
        if _identity(original) != _identity(event):
            raise RequestConflictError(
                f"request_id {request_id!r} is taken by a request with another body (sequence {seq} "
                "of the log); send the same body to attach to it, or choose another id"
            )
        milestones = subscription.relay.milestones
        subscription.relay = Relay(self._log, self._subjects, request_id)
        subscription.relay.output.submission_seq = seq
        if milestones is not None:
            milestones.submitted(time_ns)
            subscription.relay.milestones = milestones
        state = await self._log.state()
        subscription.relay.reread(max(1, state.first_seq), epoch=0)
        subscription.recorded = self._recorded(original.created_s or time_ns // 10**9)
        subscription.is_attached = True
        if original.created_s is not None:  # otherwise a service's request, which only the service cancels
            self.readers.resumed(subscription.readers, has_ended=history.has_ended)


def _identity(event: RequestSubmitted) -> tuple[str, str | None, int]:
    """The facts that two submissions of one request have in common, the number of choices included."""
    return submission_digest(event), event.parent, event.parts


def encode_or_refuse(event: RequestSubmitted) -> bytes:
    """The event's bytes.

    Raises:
        ClientError: the event cannot be encoded: half a surrogate pair, a number beyond 64 bits, or values
            nested too deep.
    """
    try:
        check_public(event)
        return encode(event)
    except UnicodeEncodeError as error:
        raise ClientError(
            "the request has text that is no Unicode (an unpaired surrogate)", code="invalid_unicode"
        ) from error
    except (OverflowError, RecursionError, TypeError, ValueError) as error:
        raise ClientError(f"the request cannot be put on the log: {error}") from error
