"""Submitting: a request becomes one event, or attaches to the request that has its id already.

The event is published with expected sequence 0, so that an id is executed once. When the id is taken, the
same model, inputs and parameters attach to the original, however long ago it was; anything else is a
conflict. Nothing is promised before the log acked. Who reads a request, and who may cancel it, is
`gateway.requests.readers`'s to say.

The log forgets, from its oldest end. What it has forgotten is gone as a whole: a submission stands before all
that followed from it. A client that has a part of such an answer is told so; nothing is run for it.

A submission outlives its client, because what was sent may be stored: if the client leaves meanwhile, the
cancel is posted behind it once it is acked. When the log does not answer in time, the client is told 503
and the submission is given up in the same way, unless the client chose the id: it may ask again under that
id and will find the answer.
"""

import asyncio
import logging
import re
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

from gateway.requests.readers import Audience, Audiences
from gateway.requests.relay import Hub, Item, Relay, RequestExpiredError
from shared import faults
from shared.errors import ClientError, DalSegnoError
from shared.events import (
    Inputs,
    MalformedEventError,
    Params,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestRejected,
    RequestSubmitted,
    check_public,
    decode,
    encode,
    submission_digest,
)
from shared.ids import RequestId, parse_request_id
from shared.log.capacity_watch import RoomWatch
from shared.log.port import (
    Durability,
    Log,
    LogState,
    LogUnavailableError,
    StoredRecord,
    WrongLastSequenceError,
)
from shared.subjects import Subjects
from shared.telemetry.log_fields import PROMPT, told_correlation
from shared.telemetry.tracing import traceparent_in

_LOGGER: Final = logging.getLogger(__name__)
_MADE_HERE: Final = re.compile(
    r"(?:chatcmpl|cmpl|embd|gen|speech|warm)-([0-9a-f]{8})-[0-9a-f]{16}(?:-[0-9]{1,4})?"
)
"""An id of `request_id_of`, or of a part of a question that has one."""
ACCEPT_S: Final = 5.0
"""How long the log may take to ack before the client is told to try again."""


class RequestConflictError(ClientError):
    """The id belongs to another request."""

    code = "request_id_conflict"
    status = 409


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request as it came in over HTTP, parsed.

    Attributes:
        id_is_chosen: the client named the id, so it may come back for the answer.
        created_s: when, in seconds since 1970.
        is_resumed: the client has a part of the answer: nothing is run for it.
        timeout_s: how long it may take; None is for ever.
        priority: who has a higher one is served first; of the others, whose `tenant` has least.
        linger_s: how long the request goes on for a client that left, and may come back.
        parent: the request this is a part of, one of so many `parts` (see `gateway.requests.choices`).
    """

    request_id: RequestId
    id_is_chosen: bool
    model: str
    inputs: Inputs
    params: Params
    created_s: int
    is_resumed: bool = False
    trace: str | None = None
    parent: RequestId | None = None
    parts: int = 1
    timeout_s: float | None = None
    linger_s: float = 0.0
    priority: int = 0
    tenant: str | None = None


def request_id_of(chosen: str | None, prefix: str) -> RequestId:
    """The id the client chose, or one nobody else has; the answer's `id`, and what `dalsegno log` takes.

    One made here says when, so that it is known for what it is when the log has forgotten it.

    Raises:
        ClientError: it cannot be an id.
    """
    if chosen is not None:
        return parse_request_id(chosen)
    return RequestId(f"{prefix}-{int(time.time()):08x}-{secrets.token_hex(8)}")


def is_forgotten(request_id: str, log: LogState) -> bool:
    """Whether a gateway made this id before the oldest event that the log holds was stored."""
    made = _MADE_HERE.fullmatch(request_id)
    if made is None:
        return False
    return int(made[1], 16) * 10**9 < log.first_ns if log.messages else log.last_seq > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What the log says of a request before it says anything of its answer.

    Attributes:
        created_s: when it was asked, in seconds since 1970.
        durability: what an event survives that this log has acked.
    """

    created_s: int
    durability: Durability


class Claim:
    """One client's hold on one request.

    Attributes:
        recorded: what is known of the request, once it is taken.
        is_attached: it was submitted before.
    """

    def __init__(
        self, relay: Relay, audience: Audience, leave: Callable[["Claim", str, float], None]
    ) -> None:
        self.relay = relay
        self.audience = audience
        self.recorded: Recorded | None = None
        self.is_attached = False
        self._leave = leave
        self._held = True

    def items(self) -> AsyncGenerator[Item, None]:
        """The answer."""
        return self.relay.items()

    def leave(self, cancel: str = "", *, linger_s: float = 0.0) -> None:
        """Let go; twice is nothing. With a reason to `cancel`, the request ends if nobody else wants it.

        It goes on for `linger_s` seconds before that, and ends only if nobody came back for it.
        """
        if self._held:
            self._held = False
            self._leave(self, cancel, linger_s)


class Submissions:
    """Every request this gateway submitted or attached to, on one log."""

    def __init__(
        self,
        log: Log,
        subjects: Subjects,
        origin: str,
        hub: Hub,
        tasks: asyncio.TaskGroup,
        numbers: Iterator[int],
        room: RoomWatch,
        most_left: int = 512,
    ) -> None:
        self.audiences = Audiences(log, subjects, origin, tasks, numbers, most_left)
        self._log = log
        self._subjects = subjects
        self._origin = origin
        self._hub = hub
        self._tasks = tasks
        self._numbers = numbers
        self._room = room

    async def submit(self, asked: Asked, hold: Callable[[Claim], object]) -> Claim:
        """Submit a request, or attach to it.

        `hold` is given the claim before anything is waited for: whoever ends the waiting lets go of it, and
        alone knows why.

        Raises:
            ClientError: it cannot be an event (too large, not text), its id is another request's, or the log
                has forgotten it.
            CapacityError: the log is away or full, or did not ack in time.
        """
        if not (self._log.connected and self._room.answers):
            raise LogUnavailableError("the log does not answer; the request was not taken, try again")
        event = self._event(asked)
        data = encode_or_refuse(event)
        relay = self._hub.open(asked.request_id)
        audience = self.audiences.enter(asked.request_id, asked.parent or asked.request_id)
        claim = Claim(relay, audience, self._left)
        hold(claim)
        try:
            async with asyncio.timeout(ACCEPT_S):
                if not (await self._may_be_new(asked) and await self._is_stored(claim, event, data)):
                    await self._attach(claim, event)
                return claim
        except TimeoutError as error:
            claim.leave("" if asked.id_is_chosen else "the log did not take it in time")
            raise LogUnavailableError(
                f"the log did not answer within {ACCEPT_S:g} s; the request was not taken, try again"
            ) from error
        except DalSegnoError:
            claim.leave()
            raise

    def _left(self, claim: Claim, cancel: str, linger_s: float) -> None:
        """A client let go; `cancel` is why nobody may need the request any more."""
        self._hub.close(claim.relay)
        claim.audience.has_ended = claim.audience.has_ended or claim.relay.output.ended
        self.audiences.leave(claim.audience, cancel, linger_s)

    # ---- what is new ---------------------------------------------------------------------------------
    async def _may_be_new(self, asked: Asked) -> bool:
        """Not what its client has a part of, nor what the log has forgotten; nor anything, while it is full.

        Raises:
            LogFullError: there is no room for something new.
        """
        if asked.is_resumed:
            return False
        if self._room.words:
            if (
                asked.id_is_chosen
                and await self._log.last(self._subjects.request(asked.request_id)) is not None
            ):
                return False
            self._room.check()
        is_made_here = asked.id_is_chosen and _MADE_HERE.fullmatch(asked.request_id) is not None
        return not (is_made_here and is_forgotten(asked.request_id, await self._log.state()))

    async def _is_stored(self, claim: Claim, event: RequestSubmitted, data: bytes) -> bool:
        """Have it stored, also if nobody waits for that any more; False: its id is taken."""
        claim.audience.publishing += 1
        storing = self._tasks.create_task(self._store(claim, event, data), name=f"submit {event.id}")
        await asyncio.wait({storing})  # which it survives, whatever ends the waiting
        if storing.cancelled():
            raise LogUnavailableError("this gateway lost its log; try again")
        outcome = storing.result()
        if outcome is not None and not isinstance(outcome, WrongLastSequenceError):
            raise outcome
        return outcome is None

    def _event(self, asked: Asked) -> RequestSubmitted:
        number = next(self._numbers)
        return RequestSubmitted(
            id=f"{self._origin}.{number}",
            writer=self._origin,
            number=number,
            request_id=asked.request_id,
            model=asked.model,
            inputs=asked.inputs,
            params=asked.params,
            origin=self._origin,
            trace=traceparent_in(asked.trace),
            parent=asked.parent,
            parts=asked.parts,
            correlation=told_correlation(),
            timeout_s=asked.timeout_s,
            priority=asked.priority,
            tenant=asked.tenant,
            created_s=asked.created_s,
            is_first=True,
        )

    async def _store(self, claim: Claim, event: RequestSubmitted, data: bytes) -> DalSegnoError | None:
        """Publish; return what went wrong. Goes on when the client is gone."""
        audience = claim.audience
        try:
            subject = self._subjects.request(audience.request_id)
            faults.reach("gateway.submission.publishing")
            seq = await self._log.publish(subject, data, expected_last_seq=0, waits_for_room=False)
            faults.reach("gateway.submission.acked")
        except DalSegnoError as error:
            return error
        else:
            audience.may_cancel = True
            claim.recorded = self._recorded(event.created_s or 0)
            claim.relay.submitted_at(seq)
            _LOGGER.info(
                "request %s asks %r with %r", event.request_id, event.inputs, event.params, extra=PROMPT
            )
            return None
        finally:
            audience.publishing -= 1
            self.audiences.settle(audience)

    def _recorded(self, created_s: int) -> Recorded:
        return Recorded(created_s=created_s, durability=self._log.durability)

    # ---- what is there already -----------------------------------------------------------------------
    async def _attach(self, claim: Claim, event: RequestSubmitted) -> None:
        """Have the claim read the request that has the id, from its beginning.

        By a new relay: what the hub handed on meanwhile may have begun in the middle.

        Raises:
            RequestConflictError: that is another request.
            RequestExpiredError: the log holds none, any more.
        """
        self._hub.close(claim.relay)
        request_id = claim.audience.request_id
        past = Past(request_id, self._subjects)
        async with aclosing(self._log.history(past.watched)) as records:
            async for record in records:
                past.fold(record)
        for record in past.control:
            claim.audience.elsewhere.fold(record)
        if past.submitted is None:
            raise past.missing()
        seq, time_ns, original = past.submitted
        if _identity(original) != _identity(event):
            raise RequestConflictError(
                f"request_id {request_id!r} is taken by a request with another body (sequence {seq} "
                "of the log); send the same body to attach to it, or choose another id"
            )
        claim.relay = Relay(self._log, self._subjects, request_id)
        claim.relay.output.submission_seq = seq
        state = await self._log.state()
        claim.relay.reread(max(1, state.first_seq), epoch=0)
        claim.recorded = self._recorded(original.created_s or time_ns // 10**9)
        claim.is_attached = True
        if original.created_s is not None:  # else a service's, which reads without saying so, and cancels
            self.audiences.resumed(claim.audience, has_ended=past.has_ended)


class Past:
    """What the log holds of one request but its output: a fold over `watched`; pure.

    Attributes:
        submitted: the first submission, as the conductor takes it (malformed ones are none): where it is
            stored, when, and what it is.
        control: the records on its control subject.
        has_ended: nothing of its answer is to come.
    """

    def __init__(self, request_id: str, subjects: Subjects) -> None:
        self.submitted: tuple[int, int, RequestSubmitted] | None = None
        self.control: list[StoredRecord] = []
        self.has_ended = False
        self._request_id = request_id
        self._subjects = subjects
        self._is_taken = False

    @property
    def watched(self) -> list[str]:
        subjects = self._subjects
        return [kind(self._request_id) for kind in (subjects.request, subjects.control, subjects.walk)]

    def fold(self, record: StoredRecord) -> None:
        """Take one record, in log order."""
        address = self._subjects.parse(record.subject)
        kind = address.kind if address is not None else None
        if kind == "control":
            self.control.append(record)
            return
        self._is_taken = self._is_taken or kind == "request"
        try:
            event = decode(record.data, kind)  # a plain service may leave the tag out
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
        """Why there is no submission."""
        if not self._is_taken:
            return RequestExpiredError(self._request_id)
        return RequestConflictError(
            f"request_id {self._request_id!r} is taken by a message that is no request; choose another id"
        )


def _identity(event: RequestSubmitted) -> tuple[str, str | None, int]:
    """What must be the same for a request to be the same: also how many parts there are."""
    return submission_digest(event), event.parent, event.parts


def encode_or_refuse(event: RequestSubmitted) -> bytes:
    """The event's bytes.

    Raises:
        ClientError: it holds what cannot be on the log: half a surrogate pair, a number beyond 64 bits,
            something nested too deep.
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
