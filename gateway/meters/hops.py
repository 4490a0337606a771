"""How long the log's part of a request takes, as the gateway sees its records come by.

    submitted ─"admitted"─> request.admitted ─"first_chunk"─> output.chunk ... ─"finished"─> request.finished

Each hop is what lies between two of these at the gateway: deciding, computing and every way over the log in
between. `delivery_s` is the way alone: from a record's storing to its being read here. The log's clock and
ours are two where they run on two machines; what seems to come before it was stored counts as 0.
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


class Journey:
    """One request as far as it has come, from now on: it is about to be submitted."""

    __slots__ = ("heard_s", "is_admitted", "is_begun")

    def __init__(self, now_s: float) -> None:
        self.heard_s = now_s
        self.is_admitted = False
        self.is_begun = False


class Hops:
    """All requests of one gateway. `clock` gives seconds, `wall_ns` nanoseconds since 1970."""

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, wall_ns: Callable[[], int] = time.time_ns
    ) -> None:
        self.took_s = {hop: Histogram.over(SECONDS) for hop in (ADMITTED, FIRST_CHUNK, FINISHED)}
        self.delivery_s = Histogram.over(SECONDS)
        self._clock = clock
        self._wall_ns = wall_ns

    def submit(self) -> Journey:
        """A request is about to be submitted."""
        return Journey(self._clock())

    def delivered(self, record: StoredRecord) -> None:
        """A record of one of our requests was read."""
        self.delivery_s.observe(max(0, self._wall_ns() - record.time_ns) / 1e9)

    def take(self, journey: Journey, event: AnyEvent) -> None:
        """A request has come so far; only the first admission and the first chunk count."""
        now_s = self._clock()
        match event:
            case OutputChunk():
                if not journey.is_begun:
                    journey.is_begun = True
                    self.took_s[FIRST_CHUNK].observe(now_s - journey.heard_s)
            case RequestAdmitted() if not journey.is_admitted and not journey.is_begun:
                journey.is_admitted = True
                self.took_s[ADMITTED].observe(now_s - journey.heard_s)
            case RequestFinished() if journey.is_begun:
                self.took_s[FINISHED].observe(now_s - journey.heard_s)
            case _:
                return
        journey.heard_s = now_s
