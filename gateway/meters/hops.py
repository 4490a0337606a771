"""Durations of a request's hops over the log, measured where the gateway reads its records.

    submitted ─"admitted"─> request.admitted ─"first_chunk"─> output.chunk ... ─"finished"─> request.finished

A hop is the time between two of these at the gateway: it includes decisions, computation and all transport
over the log. `delivery_s` is the transport alone: from the storing of a record to its reading here. The log
and the gateway have different clocks on different machines; a negative time counts as 0.
"""

import time
from collections.abc import Callable
from typing import Final

from shared.events import AnyEvent, OutputChunk, RequestAdmitted, RequestFinished
from shared.log.port import StoredRecord
from shared.telemetry.histogram import SECONDS, Histogram

ADMITTED: Final = "admitted"
FIRST_CHUNK: Final = "first_chunk"
FINISHED: Final = "finished"


class RequestHops:
    """The hops of one request so far: the time of the last one, and which were measured."""

    __slots__ = ("has_chunk", "is_admitted", "last_s")

    def __init__(self, now_s: float) -> None:
        self.last_s = now_s
        self.is_admitted = False
        self.has_chunk = False


class HopMeters:
    """The hops of all requests. `clock` returns seconds, `wall_ns` nanoseconds since 1970."""

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, wall_ns: Callable[[], int] = time.time_ns
    ) -> None:
        self.took_s = {hop: Histogram.over(SECONDS) for hop in (ADMITTED, FIRST_CHUNK, FINISHED)}
        self.delivery_s = Histogram.over(SECONDS)
        self._clock = clock
        self._wall_ns = wall_ns

    def submit(self) -> RequestHops:
        """Start to measure a request that is about to be submitted."""
        return RequestHops(self._clock())

    def delivered(self, record: StoredRecord) -> None:
        """Count the delivery of a record that belongs to a request of this gateway."""
        self.delivery_s.observe(max(0, self._wall_ns() - record.time_ns) / 1e9)

    def observe(self, hops: RequestHops, event: AnyEvent) -> None:
        """Measure the hop that an event ends; only the first admission and the first chunk count."""
        now_s = self._clock()
        match event:
            case OutputChunk():
                if not hops.has_chunk and not event.advisory:
                    hops.has_chunk = True
                    self.took_s[FIRST_CHUNK].observe(now_s - hops.last_s)
            case RequestAdmitted() if not hops.is_admitted and not hops.has_chunk:
                hops.is_admitted = True
                self.took_s[ADMITTED].observe(now_s - hops.last_s)
            case RequestFinished() if hops.has_chunk:
                self.took_s[FINISHED].observe(now_s - hops.last_s)
            case _:
                return
        hops.last_s = now_s
