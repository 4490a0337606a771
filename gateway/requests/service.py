"""The gateway's state as the routes use it: submitting requests, health, and shutting down.

A `Gateway` exists before its log is connected, so that `/health/live` answers at once.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from itertools import count
from typing import Any, Final

from configs.deployment import GatewaySettings, MediaSettings
from gateway.meters.answers import Meter
from gateway.requests.liveness import Liveness
from gateway.requests.log_follower import LogConnection, LogFollower
from gateway.requests.parsed_request import ParsedRequest
from gateway.requests.refusal_writer import RefusalWriter
from gateway.requests.submission import Subscription
from gateway.served_model import ServedModel
from models.text.reasoning import ReasoningFormat
from models.text.tool_calls import CallFormat
from shared.errors import CapacityError
from shared.log.port import Log, LogState, LogStats, LogUnavailableError
from shared.log.reader_capacity import reader_alarm
from shared.media.store import MediaStore
from shared.subjects import Subjects

_VERSION: Final = version("dalsegno")
"""Read once: whoever waits for readiness asks many times, and reading the package's metadata takes 2 ms."""


class DrainingError(CapacityError):
    """This gateway finishes its answers and takes no new request."""

    code = "shutting_down"

    def __init__(self) -> None:
        super().__init__("this gateway is shutting down; another one takes new requests")


class NotReadyError(CapacityError):
    """A worker that the model needs has never been ready."""

    code = "not_ready"


class InFlightAnswers:
    """The answers in progress; `count` is their number."""

    def __init__(self) -> None:
        self.count = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Count one answer within the block."""
        self.count += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.count -= 1
            if not self.count:
                self._idle.set()

    async def wait_until_idle(self, deadline_s: float) -> bool:
        """Wait until there are none; False if that took longer than `deadline_s`."""
        try:
            async with asyncio.timeout(deadline_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True


class Gateway:
    """One gateway. `origin` is its name on the log, new for every process.

    `log_max_age_s` is the age at which events leave the log; None: they do not.
    """

    def __init__(
        self,
        served: ServedModel,
        subjects: Subjects,
        origin: str,
        settings: GatewaySettings | None = None,
        media: MediaSettings | None = None,
        log_max_age_s: float | None = None,
    ) -> None:
        self.served = served
        self.settings = settings or GatewaySettings()
        self.media_settings = media or MediaSettings()
        self.meter = Meter()
        self.subjects = subjects
        self.origin = origin
        self.log_max_age_s = log_max_age_s
        self.started_s = int(time.time())
        self.liveness = Liveness(served.ranks)
        self.in_flight = InFlightAnswers()
        self.refusals = RefusalWriter(subjects, origin)
        self.is_draining = False
        self._numbers = count(1)
        self.follower = LogFollower(
            subjects,
            origin,
            self.liveness,
            self.meter,
            self._numbers,
            self.settings.max_in_flight,
            served.adapters,
        )

    # ---- the log ------------------------------------------------------------------------------------
    @property
    def connection(self) -> LogConnection:
        """The log that is followed now.

        Raises:
            LogUnavailableError: there is none.
        """
        if self.follower.connection is None:
            raise LogUnavailableError("this gateway has no connection to its log yet; try again")
        return self.follower.connection

    @property
    def log(self) -> Log:
        """The log that is followed now; raises like `connection`."""
        return self.connection.log

    async def log_state(self) -> LogState | None:
        """The log's state now; None if it does not answer."""
        connection = self.follower.connection
        return None if connection is None else await connection.state()

    def log_stats(self) -> LogStats | None:
        """This gateway's statistics of its log; None without a connection."""
        connection = self.follower.connection
        return None if connection is None else connection.log.stats()

    @property
    def media_store(self) -> MediaStore:
        """The store of the media, beside the log that is followed now; raises like `connection`."""
        return self.connection.media

    def next_number(self) -> int:
        """The number of this gateway's next event."""
        return next(self._numbers)

    # ---- requests -----------------------------------------------------------------------------------
    @property
    def tool_calls(self) -> CallFormat | None:
        """The format in which the model writes tool calls; None if it has none, or none that is known."""
        return self.follower.tool_calls

    @property
    def reasoning(self) -> ReasoningFormat | None:
        """The format in which the model writes its reasoning; None if it does not think."""
        return self.follower.reasoning

    async def submit(
        self, request: ParsedRequest, on_subscribed: Callable[[Subscription], object]
    ) -> Subscription:
        """Submit a request, or attach to the one with its id: see `Submissions.submit`.

        Raises:
            CapacityError: the gateway drains, has no log, or a worker has never been ready.
            ClientError: the request cannot be taken.
        """
        request = replace(request, model=self.served.own_name(request.model))
        return await self.check_open().submissions.submit(request, on_subscribed)

    def check_open(self) -> LogConnection:
        """Return the connection if this gateway takes new requests.

        Raises:
            CapacityError: it drains, has no log, or a worker has never been ready.
        """
        if self.is_draining:
            raise DrainingError
        connection = self.connection
        if not self.liveness.every_worker_was_ready:
            raise NotReadyError(
                f"the model {self.served.name!r} is not loaded yet; see /health and try again"
            )
        return connection

    # ---- health -------------------------------------------------------------------------------------
    async def health(self) -> dict[str, Any]:
        """The document of `/health`."""
        log = await self.log_state()
        log_answers = log is not None
        connection = self.follower.connection
        running = self.in_flight.count
        overview = self.liveness.overview(
            time.monotonic(),
            log_answers=log_answers,
            log_problem=connection.room.reason if log_answers and connection is not None else "",
            is_draining=self.is_draining,
            running=running,
        )
        own = "draining" if self.is_draining else "busy" if running else "ready"
        return {
            **overview,
            "log": overview["log"] | _readers_of(log),
            "version": _VERSION,
            "model": self.served.name,
            "family": self.served.family,
            "gateway": {
                "origin": self.origin,
                "state": own,
                "running": running,
                "draining": self.is_draining,
            },
        }

    # ---- shutdown -----------------------------------------------------------------------------------
    async def drain(self, deadline_s: float) -> bool:
        """Take no new request, and wait for the answers in progress; False if they did not end in time."""
        self.is_draining = True
        return await self.in_flight.wait_until_idle(deadline_s)


def _readers_of(log: LogState | None) -> dict[str, Any]:
    """The log's readers for the document of `/health`, with a warning if there are nearly too many."""
    if log is None or log.max_consumers is None:
        return {}
    readers: dict[str, Any] = {"readers": log.consumers, "max_readers": log.max_consumers}
    alarm = reader_alarm(log)
    return readers | ({"warning": alarm} if alarm else {})
