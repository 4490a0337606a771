"""Audiences: who reads an answer here, and what becomes of a request that nobody reads any more.

A request is cancelled when the last client leaves that reads it. A gateway sees only its own clients: so one
at which a request is resumed says so on the log (`request.watched`), and whoever has clients of it, too, says
the same when it hears that. While another gateway watches, nobody cancels; a gateway that has no client of it
any more says that, where it had said the other.

    gateway A submitted, nobody came elsewhere       A's last client leaves: cancelled
    resumed at B; A lost its client, or never knew   B's last client leaves: cancelled
    resumed at B; A has clients, too: A says so      the last client of both leaves: cancelled

What a service submitted over NATS is the service's to cancel: it reads, and nobody hears of it.

Log order decides: a cancel is stored only if nothing was said of the request's audience that the canceller
has not read (`expected_last_seq`). So a client that moves from one gateway to another loses its request only
if it comes after the cancel. A gateway that dies cancels nothing; what it watched is taken to be watched, and
ends at its time limit if nobody reads it.
"""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Final

from shared import faults
from shared.errors import DalSegnoError
from shared.events import (
    MalformedEventError,
    RequestCancel,
    RequestWatched,
    decode,
    encode,
)
from shared.log.port import Log, StoredRecord, WrongLastSequenceError
from shared.subjects import Subjects

_LOGGER: Final = logging.getLogger(__name__)


@dataclass(slots=True)
class Elsewhere:
    """Who else reads a request, by the records on its control subject; pure.

    Attributes:
        seq: the last of them that was read; 0 before the first.
        is_cancelled: somebody wants it to end, which is then not for us to say.
    """

    seq: int = 0
    is_cancelled: bool = False
    _said: dict[str, tuple[int, bool]] = field(default_factory=dict)  # by gateway: where, and is it over?

    def fold(self, record: StoredRecord) -> None:
        """Take one record; in any order, and any number of times."""
        self.seq = max(self.seq, record.seq)
        try:
            event = decode(record.data, "control")
        except MalformedEventError:
            return
        if isinstance(event, RequestCancel):
            self.is_cancelled = True
        elif isinstance(event, RequestWatched) and record.seq > self._said.get(event.writer, (0, True))[0]:
            self._said[event.writer] = record.seq, event.is_over

    def watchers(self, own: str) -> set[str]:
        """The other gateways that read it."""
        return {name for name, (_, is_over) in self._said.items() if not is_over and name != own}


@dataclass(slots=True, eq=False)
class Audience:
    """The clients of one request at this gateway.

    Attributes:
        question: what the request is a part of.
        publishing: submissions of it that are not acked, nor given up.
        may_cancel: it was submitted or resumed here.
        is_told: the log says that we watch it.
        has_ended: a client had its end.
        unwanted: why a client gave it up.
        until_s: those that left may come back until then, by the event loop's clock.
        farewell: the timer that gives the request up, while all have left and one may come back.
    """

    request_id: str
    question: str
    clients: int = 0
    publishing: int = 0
    may_cancel: bool = False
    is_told: bool = False
    has_ended: bool = False
    unwanted: str = ""
    until_s: float = 0.0
    farewell: asyncio.TimerHandle | None = None
    elsewhere: Elsewhere = field(default_factory=Elsewhere)


class Audiences:
    """All requests that are read at this gateway.

    Of questions whose clients have all left, and may come back, `most_left` go on: leaving is not to be a way
    to have more computed at a time than may be asked for. Whoever left first is given up first.
    """

    def __init__(
        self,
        log: Log,
        subjects: Subjects,
        origin: str,
        tasks: asyncio.TaskGroup,
        numbers: Iterator[int],
        most_left: int,
    ) -> None:
        self._log = log
        self._subjects = subjects
        self._origin = origin
        self._tasks = tasks
        self._numbers = numbers
        self._most_left = most_left
        self._all: dict[str, Audience] = {}
        self._has_parted = False
        self._left: dict[str, set[str]] = {}  # by question, which of its requests wait for clients

    def __len__(self) -> int:
        return len(self._all)

    # ---- clients ------------------------------------------------------------------------------------
    def enter(self, request_id: str, question: str) -> Audience:
        """A client wants to read a request, which is a part of `question`."""
        audience = self._all.setdefault(request_id, Audience(request_id, question))
        audience.clients += 1
        self._wait_no_more(audience)
        return audience

    def leave(self, audience: Audience, cancel: str, linger_s: float) -> None:
        """A client left; `cancel` is why nobody may need the request any more.

        It goes on for `linger_s` seconds, for a client that comes back.
        """
        audience.clients -= 1
        if cancel:
            audience.unwanted = audience.unwanted or cancel
            audience.until_s = max(audience.until_s, asyncio.get_running_loop().time() + linger_s)
        self.settle(audience)

    def resumed(self, audience: Audience, *, has_ended: bool) -> None:
        """A client takes up a request that was submitted before, perhaps elsewhere: let that be known.

        Of one that has ended, nobody need know.
        """
        audience.unwanted = ""
        if audience.clients == 1:  # it was waited for
            audience.until_s = 0.0
        audience.has_ended = audience.has_ended or has_ended
        if not audience.has_ended and (not audience.may_cancel or audience.elsewhere.watchers(self._origin)):
            audience.may_cancel = True
            self._tell(audience)

    def settle(self, audience: Audience) -> None:
        """Give up what is wanted by nobody; forget what has no clients."""
        if audience.clients or audience.publishing:
            return
        loop = asyncio.get_running_loop()
        if not (audience.may_cancel and audience.unwanted and audience.until_s > loop.time()):
            self._give_up(audience)
            return
        audience.farewell = loop.call_at(audience.until_s, self._give_up, audience)
        self._left.setdefault(audience.question, set()).add(audience.request_id)
        if len(self._left) > self._most_left:
            for one in list(next(iter(self._left.values()))):
                self._give_up(self._all[one])

    # ---- other gateways ------------------------------------------------------------------------------
    def heard(self, request_id: str, record: StoredRecord) -> None:
        """Take a record of a request's control subject, as the gateway's cursor comes by it."""
        audience = self._all.get(request_id)
        if audience is None:
            return
        audience.elsewhere.fold(record)
        if audience.clients and audience.elsewhere.watchers(self._origin):
            self._tell(audience)

    def _tell(self, audience: Audience) -> None:
        """Say that we watch, unless that is said."""
        if not audience.is_told:
            audience.is_told = True
            self._post(audience, is_over=False)

    # ---- the end -------------------------------------------------------------------------------------
    def part(self) -> None:
        """Cancel nothing any more: this gateway ends, or its log does. What it read is others' to cancel."""
        self._has_parted = True
        for audience in self._all.values():
            if audience.is_told and not audience.has_ended:
                self._post(audience, is_over=True)

    def _give_up(self, audience: Audience) -> None:
        self._wait_no_more(audience)
        self._all.pop(audience.request_id, None)
        if audience.has_ended or self._has_parted:
            return
        if audience.unwanted and audience.may_cancel:
            self._tasks.create_task(self._let_go(audience), name=f"cancel {audience.request_id}")
        elif audience.is_told:
            self._post(audience, is_over=True)

    def _wait_no_more(self, audience: Audience) -> None:
        if audience.farewell is None:
            return
        audience.farewell.cancel()
        audience.farewell = None
        waiting = self._left[audience.question]
        waiting.discard(audience.request_id)
        if not waiting:
            del self._left[audience.question]

    async def _let_go(self, audience: Audience) -> None:
        """Cancel a request, unless the log says that it is read elsewhere, or cancelled already.

        Who says that it reads no more looks again behind that: of gateways that do so at the same time, the
        last one finds that nobody reads.
        """
        subject, elsewhere = self._subjects.control(audience.request_id), audience.elsewhere
        cancel = cancel_of(audience.request_id, audience.unwanted, self._origin, next(self._numbers))
        try:
            while not elsewhere.is_cancelled:
                if not elsewhere.watchers(self._origin):
                    faults.reach("gateway.cancel.publishing")
                    with suppress(WrongLastSequenceError):
                        await self._log.publish(subject, encode(cancel), expected_last_seq=elsewhere.seq)
                        faults.reach("gateway.cancel.published")
                        return
                elif audience.is_told:
                    audience.is_told = False
                    await self._log.publish(subject, encode(self._watched(audience, is_over=True)))
                else:
                    return
                await self._read(subject, elsewhere)
        except DalSegnoError as error:  # the backlog is full, or the log is gone: the request runs on
            _LOGGER.warning("request %s could not be cancelled: %s", audience.request_id, error)

    async def _read(self, subject: str, elsewhere: Elsewhere) -> None:
        elsewhere.seq = 0
        async with aclosing(self._log.history([subject])) as records:
            async for record in records:
                elsewhere.fold(record)

    def _watched(self, audience: Audience, *, is_over: bool) -> RequestWatched:
        number = next(self._numbers)
        return RequestWatched(
            id=f"{self._origin}.{number}",
            writer=self._origin,
            number=number,
            request_id=audience.request_id,
            is_over=is_over,
        )

    def _post(self, audience: Audience, *, is_over: bool) -> None:
        event = self._watched(audience, is_over=is_over)
        try:
            self._log.post(self._subjects.control(audience.request_id), encode(event))
        except DalSegnoError as error:
            _LOGGER.warning("who reads request %s could not be told: %s", audience.request_id, error)


def cancel_of(request_id: str, reason: str, origin: str, number: int) -> RequestCancel:
    """The event that cancels a request; `number` is its place among those of the gateway `origin`."""
    return RequestCancel(
        id=f"{origin}.{number}", writer=origin, number=number, request_id=request_id, reason=reason
    )
