"""Simulated nodes of a rank: engines that batch sequences, and nodes whose calls take a recorded time. Pure.

An engine is the real scheduler with its KV blocks, prefix cache and prefill budget
(`workers.kv_engine.scheduler`), given the tokens of each sequence. Only the forward is not run: its duration
is that of the cost model.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from dalsegno.what_if.cost_model import StepCost
from dalsegno.what_if.recorded_load import Tokens
from dalsegno.what_if.timeline import Timeline
from workers.kv_engine.cache.blocks import BlockManager
from workers.kv_engine.prefill_budget import PrefillBudget
from workers.kv_engine.scheduler import Scheduler
from workers.kv_engine.sequence import Sequence, Span
from workers.kv_engine.sequence_spec import SequenceSpec
from workers.settings import EngineSettings

_TOKEN = 0
"""The id of each generated token: no later prompt is known to continue an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSize:
    """The sizes of an engine.

    Attributes:
        device: `cpu` or `cuda`.
        kv_tokens: the size of its KV cache.
        max_positions: the model's context length.
    """

    settings: EngineSettings
    device: str
    kv_tokens: int
    max_positions: int


@dataclass(slots=True, kw_only=True)
class _Served:
    target: int
    on_first: Callable[[], None]
    on_end: Callable[[], None]


class SimulatedEngine:
    """One KV engine.

    Args:
        begin_s: the time of the log's clock at which the timeline begins.
        seed: of the noise of its steps.

    Attributes:
        steps, rows: the number of its steps, and the sum of their rows.
    """

    def __init__(
        self, timeline: Timeline, size: EngineSize, cost: StepCost, *, begin_s: float = 0.0, seed: int = 0
    ) -> None:
        settings = size.settings
        self._random = random.Random(seed)
        self._begin_s = begin_s
        self._timeline = timeline
        self._cost = cost
        self._budget: PrefillBudget | None = None
        if settings.decode_slowdown_limit is not None:
            self._budget = PrefillBudget(
                decode_slowdown_limit=settings.decode_slowdown_limit, min_tokens=settings.block_size
            )
        self._scheduler = Scheduler(
            BlockManager(max(1, size.kv_tokens // settings.block_size), settings.block_size),
            max_sequences=settings.max_sequences_on(size.device),
            max_step_tokens=settings.max_step_tokens_on(size.device),
            max_positions=size.max_positions,
            prefix_cache=settings.prefix_cache,
            prefill_budget=self._budget,
        )
        self._served: dict[Sequence, _Served] = {}
        self._is_busy = False
        self.steps = 0
        self.rows = 0

    @property
    def preemptions(self) -> int:
        """The number of times that a sequence gave its blocks back."""
        return self._scheduler.counters.preemptions

    def add(
        self,
        key: str,
        tokens: Tokens,
        *,
        priority: int = 0,
        deadline_ns: int | None = None,
        tenant: str = "",
        on_first: Callable[[], None],
        on_end: Callable[[], None],
    ) -> Callable[[], None]:
        """Queue a sequence; return what removes it again. `on_first` is called with its first token.

        Raises:
            ClientError: it can never fit the pool.
        """
        spec = SequenceSpec(
            key=key,
            prompt_ids=list(tokens.prompt),
            max_tokens=tokens.generated,
            priority=priority,
            deadline_ns=deadline_ns,
            tenant=tenant,
        )
        sequence = Sequence(spec)
        self._scheduler.add(sequence)
        self._served[sequence] = _Served(target=tokens.generated, on_first=on_first, on_end=on_end)
        self._step()

        def remove() -> None:
            if self._served.pop(sequence, None) is not None:
                self._scheduler.remove(sequence)

        return remove

    def _step(self) -> None:
        """Begin a step, unless one is under way or there is nothing to compute."""
        if self._is_busy or not self._scheduler.has_work:
            return
        spans = self._scheduler.schedule()
        if not spans:
            return
        prefill = sum(span.count for span in spans if not span.is_decode)
        noise = self._cost.noise
        took_s = self._cost.of(len(spans), prefill, self._begin_s + self._timeline.now_s)
        took_s *= self._random.lognormvariate(-noise * noise / 2, noise) if noise else 1.0
        self._is_busy = True
        self._timeline.after(took_s, lambda: self._end(spans, prefill, took_s))

    def _end(self, spans: list[Span], prefill: int, took_s: float) -> None:
        self._is_busy = False
        self.steps += 1
        self.rows += len(spans)
        if self._budget is not None:
            decodes = sum(span.is_decode for span in spans)
            self._budget.observe(decodes=decodes, prefill_tokens=prefill, took_s=took_s)
        kept = [span for span in spans if span.sequence in self._served]  # others were stopped meanwhile
        self._scheduler.advance(kept, took_s)
        for span in kept:
            if span.reaches_end:
                self._token(span)
        self._step()

    def _token(self, span: Span) -> None:
        sequence = span.sequence
        served = self._served[sequence]
        if served.target:
            sequence.ids.append(_TOKEN)
            if sequence.generated == 1:
                served.on_first()
        if sequence.generated >= served.target:
            del self._served[sequence]
            self._scheduler.remove(sequence)
            served.on_end()


class SimulatedNode:
    """A node that is no engine: at most `lanes` calls at a time, each as long as recorded, in order."""

    def __init__(self, timeline: Timeline, lanes: int) -> None:
        self._timeline = timeline
        self._free = lanes
        self._waiting: deque[tuple[float, Callable[[], None]]] = deque()

    def call(self, took_s: float, on_end: Callable[[], None]) -> None:
        """Call the node."""
        self._waiting.append((took_s, on_end))
        self._begin()

    def _begin(self) -> None:
        while self._free and self._waiting:
            took_s, on_end = self._waiting.popleft()
            self._free -= 1
            self._timeline.after(took_s, lambda on_end=on_end: self._end(on_end))  # type: ignore[misc]

    def _end(self, on_end: Callable[[], None]) -> None:
        self._free += 1
        on_end()
        self._begin()
