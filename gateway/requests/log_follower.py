"""The gateway's connection to one log, and the loop that follows it.

A `LogFollower` outlives its logs: `follow` runs while one log is connected, and is called again for the next.
It hands the records to the answers, receives heartbeats, and keeps what the routes need to know: recent
request ids, the models' tool-call formats, and the meters of what other processes decided. When `follow`
ends, for whatever reason, each answer that read from the log ends with a typed error.
"""

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Final

from gateway.meters.answers import Meter
from gateway.requests.liveness import Liveness
from gateway.requests.relay import RecordRouter, decode_or_none
from gateway.requests.request_ids import RecentIds
from gateway.requests.submission import Submissions
from gateway.served_adapters import ServedAdapters
from models.text import reasoning, tool_calls
from models.text.reasoning import ReasoningFormat
from models.text.tool_calls import CallFormat
from shared.epoch_fence import EpochFence
from shared.errors import DalSegnoError
from shared.events import (
    AdapterLoaded,
    AdapterUnloaded,
    Failure,
    MalformedEventError,
    RequestResumed,
    WorkerJoined,
    WorkerLeaving,
    WorkerLost,
    encode,
)
from shared.log.capacity_watch import CapacityWatch
from shared.log.port import (
    Log,
    LogRegressedError,
    LogState,
    LogUnavailableError,
    StoredRecord,
    WrongLastSequenceError,
)
from shared.media.store import MediaStore
from shared.subject_rules import read_event
from shared.subjects import Address, Subjects

_RESUMED: Final = b"request.resumed.v1"
"""The tag of the one event on walk subjects that is decoded for requests without a client here."""
_LOST: Final[Mapping[type[DalSegnoError], str]] = {
    LogUnavailableError: "this gateway lost its log; ask again under the same request_id to get the answer",
    LogRegressedError: "the log lost its records, and this request with them; send the request again",
}
REPEAT_ADAPTERS_S: Final = 24 * 3600.0
"""The period of repeated `adapter.loaded`. The log keeps events for days."""
PROBE_S: Final = 1.0
"""The time limit of the log for a health check."""


@dataclass(frozen=True, slots=True)
class LogConnection:
    """One log while it is followed, and the media store beside it."""

    log: Log
    media: MediaStore
    submissions: Submissions
    room: CapacityWatch

    async def state(self) -> LogState | None:
        """The log's state; None if it does not answer within `PROBE_S`."""
        if not self.log.connected:
            return None
        try:
            async with asyncio.timeout(PROBE_S):
                return await self.log.state()
        except (TimeoutError, LogUnavailableError):
            return None


class LogFollower:
    """Follows the log for one gateway, named `origin`.

    Attributes:
        connection: the log that is followed now, if any; `followed` is set while there is one.
        recent_ids: the ids of recent requests of all gateways.
    """

    def __init__(
        self,
        subjects: Subjects,
        origin: str,
        liveness: Liveness,
        meter: Meter,
        numbers: Iterator[int],
        max_unread: int,
        adapters: ServedAdapters,
    ) -> None:
        self.connection: LogConnection | None = None
        self.followed = asyncio.Event()
        self.recent_ids = RecentIds()
        self._subjects = subjects
        self._origin = origin
        self._liveness = liveness
        self._meter = meter
        self._numbers = numbers
        self._max_unread = max_unread
        self._adapters = adapters
        self._workers: dict[int, WorkerJoined | WorkerLeaving] = {}  # by rank, its last event

    @property
    def tool_calls(self) -> CallFormat | None:
        """The format in which the model writes tool calls; None if it has none, or none that is known."""
        known = tool_calls.FORMATS
        names = (worker.tool_calls for worker in self._workers.values())
        return next((known[name] for name in names if name in known), None)

    @property
    def reasoning(self) -> ReasoningFormat | None:
        """The format in which the model writes its reasoning; None if it does not think."""
        known = reasoning.FORMATS
        names = (worker.reasoning for worker in self._workers.values())
        return next((known[name] for name in names if name in known), None)

    async def follow(self, log: Log, media: MediaStore) -> None:
        """Follow `log` until cancelled; `media` is the media store of the same server.

        Raises:
            LogRegressedError: the log was replaced by another one (in an exception group).
        """
        state = await log.state()
        fence = await EpochFence.read(log, self._subjects)
        for rank in self._liveness.ranks:
            subject = self._subjects.worker(rank)
            last = await log.last(subject)
            address = self._subjects.parse(subject)
            if last is not None and address is not None:
                self._note_worker(rank, address, last)
        self._adapters.begin()
        history = log.history([self._subjects.adapter("*")], 1, state.last_seq)
        async with aclosing(history) as records:
            async for record in records:
                self._note_adapter(record)
        router = RecordRouter(log, self._subjects, fence, self._meter.hops)
        lost: type[DalSegnoError] = LogUnavailableError
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._receive_heartbeats(log), name="heartbeats")
                room = CapacityWatch(log)
                await room.poll()
                tasks.create_task(room.run(), name="log capacity")
                tasks.create_task(self._repeat_adapters(log), name="adapters")
                submissions = Submissions(
                    log, self._subjects, self._origin, router, tasks, self._numbers, room, self._max_unread
                )
                self.connection = LogConnection(log, media, submissions, room)
                self.followed.set()
                await self._route_records(log, router, state.last_seq + 1, submissions)
        except* LogRegressedError:
            lost = LogRegressedError
            raise
        finally:
            if self.connection is not None:
                self.connection.submissions.readers.stop_cancelling()
            self.connection = None
            self.followed.clear()
            router.fail_all(Failure(code=lost.code, message=_LOST[lost], status=503))

    async def _route_records(
        self, log: Log, router: RecordRouter, start_seq: int, submissions: Submissions
    ) -> None:
        async with aclosing(log.read(self._subjects.for_gateway(self._origin), start_seq)) as records:
            async for record in records:
                address = router.route(record)
                if address is not None:
                    self._observe(address, record, submissions)

    def _observe(self, address: Address, record: StoredRecord, submissions: Submissions) -> None:
        """Apply a record that concerns the gateway, in addition to the answers."""
        match address.kind:
            case "worker" if address.rank is not None:
                self._note_worker(address.rank, address, record)
            case "adapter":
                self._note_adapter(record)
            case "control":
                submissions.readers.receive(str(address.request_id), record)
            case "walk":
                self.recent_ids.add(str(address.request_id))
                if _RESUMED in record.data:
                    self._meter.requests_resumed += isinstance(
                        decode_or_none(record, address), RequestResumed
                    )
            case "conductor" if record.subject == self._subjects.lost:
                lost = decode_or_none(record, address)
                if isinstance(lost, WorkerLost) and lost.rank in self._liveness.ranks:
                    self._meter.workers_lost[lost.rank] += 1

    def _note_worker(self, rank: int, address: Address, record: StoredRecord) -> None:
        if rank not in self._liveness.ranks:
            return  # of a rank that this deployment does not have
        self._liveness.note_worker(rank)
        event = decode_or_none(record, address)
        if isinstance(event, WorkerJoined | WorkerLeaving):
            self._workers[rank] = event

    def _note_adapter(self, record: StoredRecord) -> None:
        with suppress(MalformedEventError):
            _, event = read_event(record, self._subjects)
            if isinstance(event, AdapterLoaded | AdapterUnloaded):
                self._adapters.fold(event, record.seq)

    async def _repeat_adapters(self, log: Log) -> None:
        """Store the loaded adapters again before the log expires them; one that changes is left alone."""
        while True:
            await asyncio.sleep(REPEAT_ADAPTERS_S)
            for name, adapter in self._adapters.loaded.items():
                seq = self._adapters.changed_at(name)
                event = AdapterLoaded(id=f"adapter.{name}.{seq}", writer=self._origin, adapter=adapter)
                with suppress(WrongLastSequenceError):
                    await log.publish(self._subjects.adapter(name), encode(event), expected_last_seq=seq)

    async def _receive_heartbeats(self, log: Log) -> None:
        async with aclosing(log.listen(self._subjects.heartbeats())) as heartbeats:
            async for subject, payload in heartbeats:
                self._liveness.receive(subject, payload, time.monotonic())
