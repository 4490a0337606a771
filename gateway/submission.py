"""Submitting: a request becomes one event, or attaches to the request that has its id already.

The event is published with expected sequence 0, so that an id is executed once. When the id is taken, the
same model, inputs and parameters attach to the original, however long ago it was; anything else is a
conflict. Nothing is promised before the log acked.

**Who may cancel.** A request is cancelled when the last client leaves that reads it at the gateway which
submitted it. Clients attached at another gateway neither keep it alive nor end it by leaving: that gateway
cannot know who else reads. Nor does a deployment that shuts down cancel: only clients do.

A submission outlives its client, because what was sent may be stored: if the client leaves meanwhile, the
cancel is posted behind it once it is acked. When the log does not answer in time, the client is told 503
and the submission is given up in the same way, unless the client chose the id: it may ask again under that
id and will find the answer.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

from gateway.relay import Hub, Item, Relay
from shared.errors import ClientError, DalSegnoError
from shared.events import (
    Inputs,
    MalformedEventError,
    Params,
    RequestCancel,
    RequestSubmitted,
    check_public,
    decode,
    encode,
    submission_digest,
)
from shared.ids import RequestId, parse_request_id
from shared.log.port import Log, LogUnavailableError, WrongLastSequenceError
from shared.said import PROMPT, told_correlation
from shared.subjects import Subjects
from shared.tracing import traceparent_in

_LOGGER: Final = logging.getLogger(__name__)
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
        linger_s: how long the request goes on for a client that left, and may come back.
        parent: the request this is a part of, one of so many `parts` (see `gateway.choices`).
    """

    request_id: RequestId
    id_is_chosen: bool
    model: str
    inputs: Inputs
    params: Params
    trace: str | None = None
    parent: RequestId | None = None
    parts: int = 1
    linger_s: float = 0.0


def request_id_of(chosen: str | None, prefix: str) -> RequestId:
    """The id the client chose, or one nobody else has; the answer's `id`, and what `dalsegno log` takes.

    Raises:
        ClientError: it cannot be an id.
    """
    return RequestId(f"{prefix}-{secrets.token_hex(12)}") if chosen is None else parse_request_id(chosen)


@dataclass(slots=True)
class _Audience:
    """The clients of one request at this gateway. `unwanted` says why one of them gave it up.

    Those that left may come back until `until_s`, by the event loop's clock. While all have left and one may,
    `farewell` is the timer that gives the request up. `question` is what the request is a part of.
    """

    question: str
    clients: int = 0
    publishing: int = 0
    is_ours: bool = False
    unwanted: str = ""
    until_s: float = 0.0
    farewell: asyncio.TimerHandle | None = None


class Claim:
    """One client's hold on one request."""

    def __init__(self, submissions: "Submissions", relay: Relay) -> None:
        self.relay = relay
        self._submissions = submissions
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
            self._submissions.left(self.relay, "" if self.relay.output.ended else cancel, linger_s)


class Submissions:
    """Every request this gateway submitted or attached to, on one log.

    Of questions whose clients have all left, and may come back, `most_left` go on: leaving is not to be a way
    to have more computed at a time than may be asked for. Whoever left first is given up first.
    """

    def __init__(
        self,
        log: Log,
        subjects: Subjects,
        origin: str,
        hub: Hub,
        tasks: asyncio.TaskGroup,
        numbers: Iterator[int],
        most_left: int = 512,
    ) -> None:
        self._log = log
        self._subjects = subjects
        self._origin = origin
        self._hub = hub
        self._tasks = tasks
        self._numbers = numbers
        self._audiences: dict[str, _Audience] = {}
        self._most_left = most_left
        self._left: dict[str, set[str]] = {}  # by question, which of its requests wait for clients

    async def submit(self, asked: Asked, hold: Callable[[Claim], object]) -> Claim:
        """Submit a request, or attach to it.

        `hold` is given the claim before anything is waited for: whoever ends the waiting lets go of it, and
        alone knows why.

        Raises:
            ClientError: it cannot be an event (too large, not text), or its id is another request's.
            LogUnavailableError: the log did not ack in time.
        """
        if not self._log.connected:
            raise LogUnavailableError("the log does not answer; the request was not taken, try again")
        event = self._event(asked)
        data = encode_or_refuse(event)
        relay = self._hub.open(asked.request_id)
        audience = self._audiences.setdefault(
            asked.request_id, _Audience(question=asked.parent or asked.request_id)
        )
        audience.clients += 1
        audience.publishing += 1
        self._wait_no_more(asked.request_id, audience)
        claim = Claim(self, relay)
        hold(claim)
        storing = self._tasks.create_task(
            self._store(relay, audience, event, data), name=f"submit {event.id}"
        )
        try:
            async with asyncio.timeout(ACCEPT_S):
                await asyncio.wait({storing})  # which it survives, whatever ends the waiting
                if storing.cancelled():
                    raise LogUnavailableError("this gateway lost its log; try again")
                outcome = storing.result()
                if outcome is None:
                    return claim
                self._hub.close(relay)
                if isinstance(outcome, WrongLastSequenceError):
                    claim.relay = await self._attached(event, asked.request_id)
                    audience.unwanted = ""
                    if audience.clients == 1:  # it was waited for
                        audience.until_s = 0.0
                    return claim
                raise outcome
        except TimeoutError as error:
            claim.leave("" if asked.id_is_chosen else "the log did not take it in time")
            raise LogUnavailableError(
                f"the log did not answer within {ACCEPT_S:g} s; the request was not taken, try again"
            ) from error
        except DalSegnoError:
            claim.leave()
            raise

    def left(self, relay: Relay, cancel: str, linger_s: float) -> None:
        """A client let go of its relay; `cancel` is why nobody may need it any more."""
        self._hub.close(relay)
        audience = self._audiences[relay.request_id]
        audience.clients -= 1
        if cancel:
            audience.unwanted = audience.unwanted or cancel
            audience.until_s = max(audience.until_s, asyncio.get_running_loop().time() + linger_s)
        self._settle(relay.request_id, audience)

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
        )

    async def _store(
        self, relay: Relay, audience: _Audience, event: RequestSubmitted, data: bytes
    ) -> DalSegnoError | None:
        """Publish; return what went wrong. Goes on when the client is gone."""
        try:
            subject = self._subjects.request(relay.request_id)
            seq = await self._log.publish(subject, data, expected_last_seq=0)
        except DalSegnoError as error:
            return error
        else:
            audience.is_ours = True
            relay.submitted_at(seq)
            _LOGGER.info(
                "request %s asks %r with %r", event.request_id, event.inputs, event.params, extra=PROMPT
            )
            return None
        finally:
            audience.publishing -= 1
            self._settle(relay.request_id, audience)

    def _settle(self, request_id: str, audience: _Audience) -> None:
        """Cancel what is ours and wanted by nobody; forget what has no clients."""
        if audience.clients or audience.publishing:
            return
        loop = asyncio.get_running_loop()
        if not (audience.is_ours and audience.unwanted and audience.until_s > loop.time()):
            self._give_up(request_id, audience)
            return
        audience.farewell = loop.call_at(audience.until_s, self._give_up, request_id, audience)
        self._left.setdefault(audience.question, set()).add(request_id)
        if len(self._left) > self._most_left:
            for one in list(next(iter(self._left.values()))):
                self._give_up(one, self._audiences[one])

    def _give_up(self, request_id: str, audience: _Audience) -> None:
        self._wait_no_more(request_id, audience)
        self._audiences.pop(request_id, None)
        if audience.is_ours and audience.unwanted:
            self._cancel(request_id, audience.unwanted)

    def _wait_no_more(self, request_id: str, audience: _Audience) -> None:
        if audience.farewell is None:
            return
        audience.farewell.cancel()
        audience.farewell = None
        waiting = self._left[audience.question]
        waiting.discard(request_id)
        if not waiting:
            del self._left[audience.question]

    def _cancel(self, request_id: str, reason: str) -> None:
        event = cancel_of(request_id, reason, self._origin, next(self._numbers))
        try:
            self._log.post(self._subjects.control(request_id), encode(event))
        except DalSegnoError as error:  # the backlog is full, or the log is gone: the request runs on
            _LOGGER.warning("request %s could not be cancelled: %s", request_id, error)

    async def _attached(self, event: RequestSubmitted, request_id: str) -> Relay:
        """A relay for the request that has the id, from its beginning.

        It is a new one: what the hub handed on meanwhile may have begun in the middle.

        Raises:
            RequestConflictError: that is another request.
        """
        seq, original = await self._original(request_id)
        if _identity(original) != _identity(event):
            raise RequestConflictError(
                f"request_id {request_id!r} is taken by a request with another body (sequence {seq} "
                "of the log); send the same body to attach to it, or choose another id"
            )
        relay = Relay(self._log, self._subjects, request_id)
        relay.output.submission_seq = seq
        state = await self._log.state()
        relay.reread(max(1, state.first_seq), epoch=0)
        return relay

    async def _original(self, request_id: str) -> tuple[int, RequestSubmitted]:
        """The first submission under an id, as the conductor takes it; malformed ones are none."""
        async with aclosing(self._log.history([self._subjects.request(request_id)])) as records:
            async for record in records:
                try:
                    event = decode(record.data, "request")  # a plain service may leave the tag out
                except MalformedEventError:
                    continue
                if isinstance(event, RequestSubmitted):
                    return record.seq, event
        raise RequestConflictError(
            f"request_id {request_id!r} is taken by a message that is no request; choose another id"
        )


def cancel_of(request_id: str, reason: str, origin: str, number: int) -> RequestCancel:
    """The event that cancels a request; `number` is its place among those of the gateway `origin`."""
    return RequestCancel(
        id=f"{origin}.{number}", writer=origin, number=number, request_id=request_id, reason=reason
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
