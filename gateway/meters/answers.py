"""The gateway's counters of its answers; `gateway.operations.metrics` exposes them at `/metrics`.

Each HTTP answer has one `Observation`, whatever the number of its choices. All counting is done on the event
loop in plain numbers: a chunk costs about a microsecond.
"""

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from gateway.meters.gen_ai import GenAiMeters, operation_of
from gateway.meters.hops import HopMeters
from shared.events import FORWARDS, Usage
from shared.telemetry import timeline, tracing
from shared.telemetry.histogram import SECONDS, Histogram

FINISHED: Final = "finished"
"""The outcome of an answer that is complete; any other outcome is the code of its error."""
WINDOW: Final = 50
"""The number of finished answers over which `/metrics.json` averages."""


def _seconds() -> Histogram:
    return Histogram.over(SECONDS)


@dataclass(slots=True)
class Latency:
    """The latencies of the answers on one route."""

    first_token_s: Histogram = field(default_factory=_seconds)
    inter_token_s: Histogram = field(default_factory=_seconds)
    request_s: Histogram = field(default_factory=_seconds)


class Observation:
    """The observation of one answer, from its beginning to its end.

    Attributes:
        first_chunk_s: the time from its beginning to its first chunk; None before that.
    """

    __slots__ = (
        "_begun_s",
        "_between_s",
        "_between_tokens",
        "_ended",
        "_first_token_s",
        "_last_token_s",
        "_latency",
        "_meter",
        "_model",
        "_route",
        "_span",
        "_tokens",
        "first_chunk_s",
    )

    def __init__(self, meter: "Meter", route: str, model: str) -> None:
        self.first_chunk_s: float | None = None
        self._meter = meter
        self._route = route
        self._model = model
        self._latency = meter.latency[route]
        self._span = tracing.get_current_span()
        self._begun_s = meter.clock()
        self._first_token_s: float | None = None
        self._last_token_s: dict[int, float] = {}  # by choice
        self._between_s = 0.0  # from token to token of the same choice, over all choices
        self._between_tokens = 0
        self._tokens = 0
        self._ended = False

    def chunk(self, tokens: int, choice: int = 0) -> None:
        """Count a chunk of so many tokens; the first one ends the time to first token."""
        now_s = self._meter.clock()
        if self.first_chunk_s is None:
            self.first_chunk_s = now_s - self._begun_s
        if not tokens:
            return
        if self._first_token_s is None:
            self._first_token_s = now_s - self._begun_s
            self._latency.first_token_s.observe(self._first_token_s)
        if (before_s := self._last_token_s.get(choice)) is not None:
            # The tokens of one chunk share the time since the previous chunk.
            self._latency.inter_token_s.observe((now_s - before_s) / tokens, tokens)
            self._between_s += now_s - before_s
            self._between_tokens += tokens
        self._last_token_s[choice] = now_s
        self._tokens += tokens
        self._meter.generated_tokens += tokens

    def end(self, outcome: str, usage: Usage | None = None) -> None:
        """End with `finished`, or the code of the error; a second call does nothing."""
        if self._ended:
            return
        self._ended = True
        self._meter.outcomes[self._route, outcome] += 1
        self._span.set_attributes({"dalsegno.outcome": outcome, "dalsegno.tokens": self._tokens})
        if self._meter.timeline is not None:
            self._meter.timeline.interval(
                f"answer {self._route}",
                "answer",
                self._begun_s,
                self._meter.clock(),
                outcome=outcome,
                tokens=self._tokens,
            )
        if usage is not None:
            self._meter.add(usage)
        took_s = self._meter.clock() - self._begun_s
        self._meter.gen_ai.observe(
            operation_of(self._route),
            self._model,
            took_s=took_s,
            error="" if outcome == FINISHED else outcome,
            first_token_s=self._first_token_s,
            output_token_s=self._between_s / self._between_tokens if self._between_tokens else None,
            usage=usage,
        )
        if outcome != FINISHED:
            self._span.set_attributes({"error.type": outcome})  # the middleware decides on the status
            return
        self._latency.request_s.observe(took_s)
        self._meter.recent.append((took_s, self._tokens))


class Meter:
    """The gateway's counters. `clock` returns seconds.

    Attributes:
        outcomes: ended answers by route and outcome.
        prompt_tokens: of answers that ended with a usage; `generated_tokens` of chunks as they were sent.
        counts: sums of what the model counted in answers that ended (`Usage.counts`).
        diffusion_tokens: tokens of those answers whose forward passes were counted, of diffusion language
            models.
        recent: duration and tokens of each of the last finished answers.
        resumed: answers that a client resumed, by route.
        requests_resumed: requests, of all gateways, that a conductor placed again.
        workers_lost: incarnations of workers that a conductor declared lost, by rank.
        http: HTTP responses by method, route and status.
        gen_ai: the same latencies and tokens by OpenTelemetry's conventions.
        timeline: the profile to which answers are written, if one is recorded.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.latency: defaultdict[str, Latency] = defaultdict(Latency)
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.counts: Counter[str] = Counter()
        self.diffusion_tokens = 0
        self.recent: deque[tuple[float, int]] = deque(maxlen=WINDOW)
        self.http: Counter[tuple[str, str, int]] = Counter()
        self.resumed: Counter[str] = Counter()
        self.requests_resumed = 0
        self.workers_lost: Counter[int] = Counter()
        self.hops = HopMeters()
        self.gen_ai = GenAiMeters()
        self.timeline = timeline.recording()

    @property
    def forwards(self) -> int:
        """The forward passes of diffusion language models."""
        return self.counts[FORWARDS]

    def add(self, usage: Usage) -> None:
        """Count the usage of an answer that ended."""
        self.prompt_tokens += usage.prompt_tokens
        self.counts.update(usage.counts)
        if FORWARDS in usage.counts:
            self.diffusion_tokens += usage.completion_tokens

    def begin(self, route: str, model: str, *, is_resumed: bool = False) -> Observation:
        """Begin to observe an answer of `model` on `route`, the path's template."""
        self.resumed[route] += is_resumed
        return Observation(self, route, model)
