"""Counters and statistics of the engine. Imports no torch."""

from dataclasses import dataclass, field

from shared.telemetry.histogram import ROWS, SECONDS, Histogram


@dataclass(slots=True)
class WorkCounters:
    """Work done since the engine was made; `shared.meters.WorkerMeters` describes the metrics made of it.

    The engine thread writes the fields while other threads read them: a reader may see one field a step ahead
    of another.

    Attributes:
        ahead: steps that were launched before the previous step was read. Not in the meters.
        discarded_tokens: tokens of such steps for sequences that had ended, or were held. Not in the meters.
    """

    sequences: int = 0
    computed_tokens: int = 0
    sampled_tokens: int = 0
    ahead: int = 0
    discarded_tokens: int = 0
    batch_rows: Histogram = field(default_factory=lambda: Histogram.over(ROWS))
    step_s: Histogram = field(default_factory=lambda: Histogram.over(SECONDS))

    def count_step(self, *, sequences: int, computed: int, sampled: int, took_s: float) -> None:
        """Add one finished step."""
        self.computed_tokens += computed
        self.sampled_tokens += sampled
        self.batch_rows.observe(sequences)
        self.step_s.observe(took_s)


@dataclass(slots=True)
class CacheCounters:
    """What the prefix cache, drafts and windows saved since the engine was made, and preemption lost.

    Attributes:
        queries: tokens of admitted sequences, all of which were looked up in the prefix cache.
        hits: those of them that were cached.
        preemptions: how often a sequence had to give its blocks back.
        changed_factors: how often a sequence was computed again because it grew past a change of factors.
        unread_blocks: blocks that sequences gave back because they lay before every layer's window.
        drafted: drafted tokens.
        accepted: those of them that the model sampled, too.
    """

    queries: int = 0
    hits: int = 0
    preemptions: int = 0
    changed_factors: int = 0
    unread_blocks: int = 0
    drafted: int = 0
    accepted: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """The current state of an engine.

    Attributes:
        kernels: the implementation that computes the layers (`workers.kv_engine.node.Backbone.kernels`).
        forwards: launched forwards.
        running, waiting: sequences that are admitted, and that wait for admission.
        held: running sequences that are held.
        kv_used: tokens in blocks that sequences use; the `kv_` fields count whole blocks.
        kv_evictable: tokens in blocks that are cached but unused, and can be allocated.
        kv_total: tokens in all blocks.
        cache, work: the engine's own counters, not copies.
    """

    kernels: str = ""
    forwards: int = 0
    running: int = 0
    waiting: int = 0
    held: int = 0
    kv_used: int = 0
    kv_evictable: int = 0
    kv_total: int = 0
    cache: CacheCounters = field(default_factory=CacheCounters)
    work: WorkCounters = field(default_factory=WorkCounters)
