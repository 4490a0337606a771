"""What the gateway counts of the answers it gives; `gateway.operations.metrics` shows it at `/metrics`.

An answer is observed from its beginning to its end: one `Observation` per HTTP answer, whatever the number
of its choices. Everything is counted on the event loop, in plain numbers: a chunk costs about a microsecond.
"""

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from gateway.meters.hops import Hops
from shared.events import Usage
from shared.telemetry import timeline, tracing
from shared.telemetry.histogram import SECONDS, Histogram

FINISHED: Final = "finished"
"""The outcome of an answer that is complete; of any other, the code of its error."""
WINDOW: Final = 50
"""Over so many of the answers finished last `/metrics.json` averages."""


def _seconds() -> Histogram:
    return Histogram.over(SECONDS)


@dataclass(slots=True)
class Latency:
    """How long the answers on one route took."""

    first_token_s: Histogram = field(default_factory=_seconds)
    inter_token_s: Histogram = field(default_factory=_seconds)
    request_s: Histogram = field(default_factory=_seconds)


class Observation:
    """One answer while it is given."""

    __slots__ = ("_begun_s", "_ended", "_heard_s", "_latency", "_meter", "_route", "_span", "_tokens")

    def __init__(self, meter: "Meter", route: str) -> None:
        self._meter = meter
        self._route = route
        self._latency = meter.latency[route]
        self._span = tracing.current()
        self._begun_s = meter.clock()
        self._heard_s: dict[int, float] = {}  # when each choice's last token came
        self._tokens = 0
        self._ended = False

    def chunk(self, tokens: int, choice: int = 0) -> None:
        """A chunk with so many tokens was sent; the first one ends the time to first token."""
        if not tokens:
            return
        now_s = self._meter.clock()
        if not self._heard_s:
            self._latency.first_token_s.observe(now_s - self._begun_s)
        if (before_s := self._heard_s.get(choice)) is not None:
            # Tokens that come together waited for one another: each is given its share of the time.
            self._latency.inter_token_s.observe((now_s - before_s) / tokens, tokens)
        self._heard_s[choice] = now_s
        self._tokens += tokens
        self._meter.generated_tokens += tokens

    def end(self, outcome: str, usage: Usage | None = None) -> None:
        """The answer ended: `finished`, or the code of the error it ended with. Twice is nothing."""
        if self._ended:
            return
        self._ended = True
        self._meter.outcomes[self._route, outcome] += 1
        self._span.set({"dalsegno.outcome": outcome, "dalsegno.tokens": self._tokens})
        if self._meter.timeline is not None:
            self._meter.timeline.stretch(
                f"answer {self._route}",
                "answer",
                self._begun_s,
                self._meter.clock(),
                outcome=outcome,
                tokens=self._tokens,
            )
        if usage is not None:
            self._meter.prompt_tokens += usage.prompt_tokens
        if outcome != FINISHED:
            self._span.fail(outcome)
            return
        took_s = self._meter.clock() - self._begun_s
        self._latency.request_s.observe(took_s)
        self._meter.recent.append((took_s, self._tokens))


class Meter:
    """The gateway's counters. `clock` gives seconds.

    Attributes:
        outcomes: ended answers by route and outcome.
        latency: by route.
        prompt_tokens: of answers that ended and said so; `generated_tokens` of chunks, as they were sent.
        recent: the answers finished last: how long each took, and how many tokens it had.
        resumed: answers that were taken up again, by route.
        requests_resumed: requests that were given a place again, whoever asked for them, as the log tells.
        workers_lost: lives that were declared over, by rank, as the log tells.
        http: HTTP responses by method, route and status.
        hops: how long the log's part of a request took.
        timeline: where each answer is noted, if that is asked for.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.latency: defaultdict[str, Latency] = defaultdict(Latency)
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.recent: deque[tuple[float, int]] = deque(maxlen=WINDOW)
        self.http: Counter[tuple[str, str, int]] = Counter()
        self.resumed: Counter[str] = Counter()
        self.requests_resumed = 0
        self.workers_lost: Counter[int] = Counter()
        self.hops = Hops()
        self.timeline = timeline.recording()

    def begin(self, route: str, *, is_resumed: bool = False) -> Observation:
        """An answer begins on `route`, the path's template, or goes on where its client lost it."""
        self.resumed[route] += is_resumed
        return Observation(self, route)
