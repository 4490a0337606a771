"""Readers: the clients of each request at this gateway, and the cancel of a request that has none left.

A gateway with at least one client of a request *watches* it. `Submissions` reports each client.

A request is cancelled when its last client leaves. A gateway sees only its own clients. So a gateway at which
a request is resumed announces that on the log (`request.watched`), and a gateway that reads such an
announcement and has clients of the request, too, announces that it watches it as well. While another gateway
watches a request, no gateway cancels it. When a gateway that has announced a request has no client of it any
more, it announces the end of its watch (`is_over`).

    submitted at A, resumed nowhere else             A's last client leaves: cancelled
    resumed at B; A has lost its client              B's last client leaves: cancelled
    resumed at B; A has clients, and announces it    the last client of both leaves: cancelled

A request that a service submitted over NATS is cancelled by that service alone: its reader is not announced.

Log order decides. A cancel is stored only if the request's control subject has no record that the canceller
has not read (`expected_last_seq`). So a client that moves from one gateway to another loses its request only
if it arrives after the cancel. A gateway that dies cancels nothing. The requests it watched count as watched,
and end at their time limit if they have no reader. See ADR 12.
"""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Final

from shared import faults
from shared.errors import DalSegnoError
from shared.events import MalformedEventError, RequestCancel, RequestWatched, decode, encode
from shared.log.port import Log, StoredRecord, WrongLastSequenceError
from shared.subjects import Subjects

_LOGGER: Final = logging.getLogger(__name__)


@dataclass(slots=True)
class OtherGateways:
    """The other gateways that read a request, by the records on its control subject; pure.

    Attributes:
        seq: the position of the last record that was read; 0 before the first.
        is_cancelled: a cancel is stored, so this gateway need not publish one.
    """

    seq: int = 0
    is_cancelled: bool = False
    _announced: dict[str, tuple[int, bool]] = field(default_factory=dict)  # by gateway: position, is over

    def fold(self, record: StoredRecord) -> None:
        """Apply one record, in any order and any number of times: the highest position counts."""
        self.seq = max(self.seq, record.seq)
        try:
            event = decode(record.data, "control")
        except MalformedEventError:
            return
        if isinstance(event, RequestCancel):
            self.is_cancelled = True
        elif (
            isinstance(event, RequestWatched) and record.seq > self._announced.get(event.writer, (0, True))[0]
        ):
            self._announced[event.writer] = record.seq, event.is_over

    def watchers(self, own: str) -> set[str]:
        """The gateways other than `own` that read the request."""
        return {name for name, (_, is_over) in self._announced.items() if not is_over and name != own}


@dataclass(slots=True, eq=False)
class Readers:
    """The state of one request at this gateway: the number of its clients, and its disconnect grace.

    Attributes:
        group: the id of the HTTP request; an HTTP request with several choices makes several requests.
        publishing: submissions of the request that are neither acked nor given up.
        may_cancel: the request was submitted or resumed here.
        is_announced: the log says that this gateway watches the request.
        has_ended: a client has received the end of the answer.
        grace_until_s: clients may come back until then, by the event loop's clock.
        expiry: the timer of the disconnect grace, while the request has no client.
    """

    request_id: str
    group: str
    clients: int = 0
    publishing: int = 0
    may_cancel: bool = False
    is_announced: bool = False
    has_ended: bool = False
    cancel_reason: str = ""
    grace_until_s: float = 0.0
    expiry: asyncio.TimerHandle | None = None
    others: OtherGateways = field(default_factory=OtherGateways)


class ReaderRegistry:
    """The readers of all requests at this gateway.

    At most `max_unread` HTTP requests continue without a client during their disconnect grace: otherwise
    clients that leave could have more computed at a time than the limit of answers allows. Above that, the
    request whose client left first is cancelled.
    """

    def __init__(
        self,
        log: Log,
        subjects: Subjects,
        origin: str,
        tasks: asyncio.TaskGroup,
        numbers: Iterator[int],
        max_unread: int,
    ) -> None:
        self._log = log
        self._subjects = subjects
        self._origin = origin
        self._tasks = tasks
        self._numbers = numbers
        self._max_unread = max_unread
        self._all: dict[str, Readers] = {}
        self._is_released = False
        self._unread: dict[str, set[str]] = {}  # by group, the ids of its requests in their disconnect grace

    def __len__(self) -> int:
        return len(self._all)

    # ---- clients ------------------------------------------------------------------------------------
    def enter(self, request_id: str, group: str) -> Readers:
        """Add a client to the readers of a request."""
        readers = self._all.setdefault(request_id, Readers(request_id, group))
        readers.clients += 1
        self._stop_grace(readers)
        return readers

    def leave(self, readers: Readers, cancel: str, grace_s: float) -> None:
        """Remove a client; `cancel` is the reason to end the request if it has no other reader.

        The request continues for `grace_s` seconds before that, for a client that comes back.
        """
        readers.clients -= 1
        if cancel:
            readers.cancel_reason = readers.cancel_reason or cancel
            readers.grace_until_s = max(readers.grace_until_s, asyncio.get_running_loop().time() + grace_s)
        self.settle(readers)

    def resumed(self, readers: Readers, *, has_ended: bool) -> None:
        """A client resumes a request that was submitted before, perhaps elsewhere: announce it.

        A request that has ended is not announced.
        """
        readers.cancel_reason = ""
        if readers.clients == 1:  # the request had no client here: its grace is over
            readers.grace_until_s = 0.0
        readers.has_ended = readers.has_ended or has_ended
        if not readers.has_ended and (not readers.may_cancel or readers.others.watchers(self._origin)):
            readers.may_cancel = True
            self._announce(readers)

    def settle(self, readers: Readers) -> None:
        """Without clients: start the disconnect grace, or remove the readers, and cancel if need be."""
        if readers.clients or readers.publishing:
            return
        loop = asyncio.get_running_loop()
        if not (readers.may_cancel and readers.cancel_reason and readers.grace_until_s > loop.time()):
            self._remove(readers)
            return
        readers.expiry = loop.call_at(readers.grace_until_s, self._remove, readers)
        self._unread.setdefault(readers.group, set()).add(readers.request_id)
        if len(self._unread) > self._max_unread:
            for one in list(next(iter(self._unread.values()))):
                self._remove(self._all[one])

    # ---- other gateways ------------------------------------------------------------------------------
    def receive(self, request_id: str, record: StoredRecord) -> None:
        """Apply a record of a request's control subject, read by the gateway's cursor."""
        readers = self._all.get(request_id)
        if readers is None:
            return
        readers.others.fold(record)
        if readers.clients and readers.others.watchers(self._origin):
            self._announce(readers)

    def _announce(self, readers: Readers) -> None:
        """Announce once that this gateway watches the request."""
        if not readers.is_announced:
            readers.is_announced = True
            self._post(readers, is_over=False)

    # ---- the end -------------------------------------------------------------------------------------
    def stop_cancelling(self) -> None:
        """Announce the end of every watch, and cancel nothing more: the gateway or its log connection ends.

        Other gateways may cancel from now on.
        """
        self._is_released = True
        for readers in self._all.values():
            if readers.is_announced and not readers.has_ended:
                self._post(readers, is_over=True)

    def _remove(self, readers: Readers) -> None:
        self._stop_grace(readers)
        self._all.pop(readers.request_id, None)
        if readers.has_ended or self._is_released:
            return
        if readers.cancel_reason and readers.may_cancel:
            self._tasks.create_task(self._cancel(readers), name=f"cancel {readers.request_id}")
        elif readers.is_announced:
            self._post(readers, is_over=True)

    def _stop_grace(self, readers: Readers) -> None:
        if readers.expiry is None:
            return
        readers.expiry.cancel()
        readers.expiry = None
        unread = self._unread[readers.group]
        unread.discard(readers.request_id)
        if not unread:
            del self._unread[readers.group]

    async def _cancel(self, readers: Readers) -> None:
        """Cancel a request, unless the log says that it is read elsewhere, or cancelled already.

        After announcing that it reads no more, a gateway reads the subject again. If several gateways do so
        at the same time, the last one finds no reader, and cancels.
        """
        subject, others = self._subjects.control(readers.request_id), readers.others
        cancel = cancel_of(readers.request_id, readers.cancel_reason, self._origin, next(self._numbers))
        try:
            while not others.is_cancelled:
                if not others.watchers(self._origin):
                    faults.reach("gateway.cancel.publishing")
                    with suppress(WrongLastSequenceError):
                        await self._log.publish(subject, encode(cancel), expected_last_seq=others.seq)
                        faults.reach("gateway.cancel.published")
                        return
                elif readers.is_announced:
                    readers.is_announced = False
                    await self._log.publish(subject, encode(self._watched(readers, is_over=True)))
                else:
                    return
                await self._read(subject, others)
        except DalSegnoError as error:  # the log is full or away: the request runs to its end
            _LOGGER.warning("request %s could not be cancelled: %s", readers.request_id, error)

    async def _read(self, subject: str, others: OtherGateways) -> None:
        others.seq = 0
        async with aclosing(self._log.history([subject])) as records:
            async for record in records:
                others.fold(record)

    def _watched(self, readers: Readers, *, is_over: bool) -> RequestWatched:
        number = next(self._numbers)
        return RequestWatched(
            id=f"{self._origin}.{number}",
            writer=self._origin,
            number=number,
            request_id=readers.request_id,
            is_over=is_over,
        )

    def _post(self, readers: Readers, *, is_over: bool) -> None:
        event = self._watched(readers, is_over=is_over)
        try:
            self._log.post(self._subjects.control(readers.request_id), encode(event))
        except DalSegnoError as error:
            _LOGGER.warning("the readers of request %s could not be announced: %s", readers.request_id, error)


def cancel_of(
    request_id: str, reason: str, origin: str, number: int, *, deletes: bool = False
) -> RequestCancel:
    """The event that cancels a request; `number` counts the events of the gateway `origin`."""
    return RequestCancel(
        id=f"{origin}.{number}",
        writer=origin,
        number=number,
        request_id=request_id,
        reason=reason,
        deletes=deletes,
    )
