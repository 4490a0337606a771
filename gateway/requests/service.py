"""What the routes share: the log when it is there, who is working, and how many streams run.

A `Gateway` exists before the log does, so that `/health/live` answers at once. `follow` is one life with
one log; when it ends, for whatever reason, every answer that hung on it ends with a typed error.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import count
from typing import Any, Final

from configs.deployment import DeploymentConfig, GatewaySettings
from gateway.meters.answers import Meter
from gateway.requests.liveness import Presence
from gateway.requests.recent_ids import Passed
from gateway.requests.relay import Hub, decode_or_none
from gateway.requests.submission import Asked, Claim, Submissions
from models import registry
from models.text.tool_calls import FORMATS, CallFormat
from shared.epoch_fence import EpochFence
from shared.errors import CapacityError, DalSegnoError, ModelNotFoundError
from shared.events import Failure, RequestResumed, WorkerJoined, WorkerLeaving, WorkerLost
from shared.log.capacity_watch import RoomWatch
from shared.log.port import Log, LogRegressedError, LogState, LogStats, LogUnavailableError, StoredRecord
from shared.subjects import Address, Subjects

RESUMED: Final = b"request.resumed.v1"
"""What of all ends and beginnings is worth decoding, if it is nobody's here."""
_LOST: Final[Mapping[type[DalSegnoError], str]] = {
    LogUnavailableError: "this gateway lost its log; ask again under the same request_id to get the answer",
    LogRegressedError: "the log lost what it held, and this request with it; ask again to have it run anew",
}
PROBE_S: Final = 1.0
"""How long the log may take to answer a health check."""


class DrainingError(CapacityError):
    """This gateway finishes what runs and takes nothing new."""

    code = "shutting_down"

    def __init__(self) -> None:
        super().__init__("this gateway is shutting down; another one takes new requests")


class NotReadyError(CapacityError):
    """No worker has ever been ready to do the work."""

    code = "not_ready"


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What a gateway has to know of the deployment: the model's name, and what one may ask of it.

    Attributes:
        modalities: what it takes, and `outputs` what it puts out.
        media: what the bytes of a modality mean.
        voices: who can speak, the first by default.
    """

    name: str
    family: str
    ranks: tuple[int, ...]
    max_seq_len: int
    modalities: tuple[str, ...] = ("text",)
    outputs: tuple[str, ...] = ("text",)
    media: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    voices: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: DeploymentConfig) -> "Served":
        graph = registry.graph(config.model)
        return cls(
            name=config.name or config.model,
            family=config.model,
            ranks=tuple(config.ranks),
            max_seq_len=config.max_seq_len,
            modalities=graph.modalities,
            outputs=graph.outputs,
            media=graph.media,
            voices=graph.voices,
        )

    def check_model(self, asked: str | None) -> None:
        """Refuse a model that is not served here.

        Raises:
            ModelNotFoundError: that is another one.
        """
        if asked is not None and asked != self.name:
            raise ModelNotFoundError(asked, self.name)


@dataclass(frozen=True, slots=True)
class _Line:
    """The connection to one log, once it is followed."""

    log: Log
    submissions: Submissions
    room: RoomWatch


class Gateway:
    """One gateway's state. `origin` is its name on the log, new for every life."""

    def __init__(
        self, served: Served, subjects: Subjects, origin: str, settings: GatewaySettings | None = None
    ) -> None:
        self.served = served
        self.settings = settings or GatewaySettings()
        self.meter = Meter()
        self.subjects = subjects
        self.origin = origin
        self.started_s = int(time.time())
        self.presence = Presence(served.ranks)
        self.passed = Passed()
        self.is_draining = False
        self.followed = asyncio.Event()
        self._line: _Line | None = None
        self._tool_calls: dict[int, str] = {}
        self._numbers = count(1)
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def running(self) -> int:
        """How many answers are being given."""
        return self._running

    # ---- one life with one log ----------------------------------------------------------------------
    async def follow(self, log: Log) -> None:
        """Relay from `log` until cancelled.

        Raises:
            LogRegressedError: it is another log than it was (in an exception group).
        """
        state = await log.state()
        fence = EpochFence.behind(await log.last(self.subjects.epoch))
        for rank in self.served.ranks:
            subject = self.subjects.worker(rank)
            last = await log.last(subject)
            address = self.subjects.parse(subject)
            if last is not None and address is not None:
                self._saw_worker(rank, address, last)
        hub = Hub(log, self.subjects, fence, self.meter.hops)
        lost: type[DalSegnoError] = LogUnavailableError
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._listen(log), name="beats")
                room = RoomWatch(log)
                await room.look()
                tasks.create_task(room.run(), name="room")
                submissions = Submissions(
                    log,
                    self.subjects,
                    self.origin,
                    hub,
                    tasks,
                    self._numbers,
                    room,
                    self.settings.max_in_flight,
                )
                self._line = _Line(log, submissions, room)
                self.followed.set()
                await self._relay(log, hub, state.last_seq + 1, submissions)
        except* LogRegressedError:
            lost = LogRegressedError
            raise
        finally:
            if self._line is not None:
                self._line.submissions.audiences.part()
            self._line = None
            self.followed.clear()
            hub.fail_all(Failure(code=lost.code, message=_LOST[lost], status=503))

    def _take(self, address: Address, record: StoredRecord, submissions: Submissions) -> None:
        """What a record says beside the answers."""
        match address.kind:
            case "worker" if address.rank is not None:
                self._saw_worker(address.rank, address, record)
            case "control":
                submissions.audiences.heard(str(address.request_id), record)
            case "walk":
                self.passed.add(str(address.request_id))
                if RESUMED in record.data:
                    self.meter.requests_resumed += isinstance(decode_or_none(record, address), RequestResumed)
            case "conductor" if record.subject == self.subjects.lost:
                lost = decode_or_none(record, address)
                if isinstance(lost, WorkerLost):
                    self.meter.workers_lost[lost.rank] += 1

    def _saw_worker(self, rank: int, address: Address, record: StoredRecord) -> None:
        self.presence.saw_worker(rank)
        said = decode_or_none(record, address)
        if isinstance(said, WorkerJoined | WorkerLeaving):
            self._tool_calls[rank] = said.tool_calls

    @property
    def tool_calls(self) -> CallFormat | None:
        """How the model writes calls of tools; None where it cannot, or in no way that is known here."""
        return next((FORMATS[name] for name in self._tool_calls.values() if name in FORMATS), None)

    async def _relay(self, log: Log, hub: Hub, start_seq: int, submissions: Submissions) -> None:
        async with aclosing(log.read(self.subjects.for_gateway(self.origin), start_seq)) as records:
            async for record in records:
                address = hub.take(record)
                if address is not None:
                    self._take(address, record, submissions)

    async def _listen(self, log: Log) -> None:
        async with aclosing(log.listen(self.subjects.beats())) as beats:
            async for subject, payload in beats:
                self.presence.hear(subject, payload, time.monotonic())

    @property
    def log(self) -> Log:
        """The log that is followed.

        Raises:
            LogUnavailableError: none is, now.
        """
        if self._line is None:
            raise LogUnavailableError("this gateway has no connection to its log yet; try again")
        return self._line.log

    def next_number(self) -> int:
        """For the next event of this gateway."""
        return next(self._numbers)

    # ---- requests -----------------------------------------------------------------------------------
    @contextmanager
    def answering(self) -> Iterator[None]:
        """Count one answer while it is given, so that a shutdown waits for it."""
        self._running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    async def submit(self, asked: Asked, hold: Callable[[Claim], object]) -> Claim:
        """Submit a request, or attach to it; `hold` is given the claim at once (see `submission`).

        Raises:
            CapacityError: not now: shutting down, no log, no worker yet.
            ClientError: the request cannot be taken.
        """
        if self.is_draining:
            raise DrainingError
        line = self._line
        if line is None:
            raise LogUnavailableError("this gateway has no connection to its log yet; try again")
        if not self.presence.every_worker_was_ready:
            raise NotReadyError(
                f"the model {self.served.name!r} is not loaded yet; see /health and try again"
            )
        return await line.submissions.submit(asked, hold)

    # ---- health -------------------------------------------------------------------------------------
    async def log_answers(self) -> bool:
        """Whether the log answers now."""
        return await self.log_state() is not None

    async def log_state(self) -> LogState | None:
        """The log as it answers now; None when it does not."""
        line = self._line
        if line is None or not line.log.connected:
            return None
        try:
            async with asyncio.timeout(PROBE_S):
                return await line.log.state()
        except (TimeoutError, LogUnavailableError):
            return None

    def log_stats(self) -> LogStats | None:
        """How this gateway gets on with its log; None while it has none."""
        return None if self._line is None else self._line.log.stats()

    async def health(self) -> dict[str, Any]:
        """What `/health` answers."""
        log_answers = await self.log_answers()
        overview = self.presence.overview(
            time.monotonic(),
            log_answers=log_answers,
            log_room=self._line.room.words if log_answers and self._line is not None else "",
            is_draining=self.is_draining,
            running=self._running,
        )
        own = "draining" if self.is_draining else "busy" if self._running else "ready"
        return {
            **overview,
            "version": version("dalsegno"),
            "model": self.served.name,
            "family": self.served.family,
            "gateway": {
                "origin": self.origin,
                "state": own,
                "running": self._running,
                "draining": self.is_draining,
            },
        }

    # ---- the end ------------------------------------------------------------------------------------
    async def drain(self, deadline_s: float) -> bool:
        """Take nothing new, and wait for what runs; whether all of it ended in time."""
        self.is_draining = True
        try:
            async with asyncio.timeout(deadline_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True
