"""Counters that a process sends in its heartbeats, under `meters`.

They are totals since the start of the process, so a lost heartbeat loses nothing. A gateway exposes the
latest ones at `/metrics`; there a counter that starts again at zero shows a restarted process.
"""

import msgspec

from shared.log.port import LogStats
from shared.telemetry.histogram import ROWS, SECONDS, Histogram


class TensorMeters(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of a worker's tensors that other workers may read.

    Attributes:
        total_bytes, free_bytes: the size of the arena, and its free part.
        slots: the number of slots in use.
        puts, gets: tensors that were stored and read.
        gone: reads of tensors that no longer existed.
        refused: invalid handles and requests.
        fetched_bytes: bytes read from other workers.
    """

    total_bytes: int = 0
    free_bytes: int = 0
    slots: int = 0
    puts: int = 0
    gets: int = 0
    gone: int = 0
    refused: int = 0
    fetched_bytes: int = 0


class EdgeMeters(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of a worker's events to and from other ranks, and of its streams.

    Attributes:
        told, heard: events sent to other ranks, and received from them.
        early: received events that wait for their order (out-of-order edges); `early_bytes` is their size.
        items: stream items produced here; `chunks` is the number of chunks consumed here.
    """

    told: int = 0
    heard: int = 0
    early: int = 0
    early_bytes: int = 0
    items: int = 0
    chunks: int = 0


class PrefixMeters(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of an engine's prefix cache, preemptions and speculative decoding.

    Attributes:
        asked: tokens of admitted sequences (the cache's queries).
        hit: those of them whose keys and values were cached (the cache's hits).
        kept: cached tokens that no sequence uses, which can be evicted.
        preempted: preemptions of sequences, which gave their blocks back and continued later.
        guessed: drafted tokens.
        stood: accepted tokens.
    """

    asked: int = 0
    hit: int = 0
    kept: int = 0
    preempted: int = 0
    guessed: int = 0
    stood: int = 0


class EncoderMeters(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of a worker's encoder caches, which keep what encoders computed of media.

    Attributes:
        hits, misses: lookups that found rows, and those that did not.
        evicted: entries that were dropped for newer ones.
        entries, nbytes: the entries at present, and their size in bytes.
    """

    hits: int = 0
    misses: int = 0
    evicted: int = 0
    entries: int = 0
    nbytes: int = 0


class StepMeters(msgspec.Struct, kw_only=True):
    """Counters of a stepped node (`models.stepped`); its engine's thread writes them.

    Attributes:
        runs: runs under way, or waiting to be started.
        calls: calls per forward.
        step_s: the duration of a forward, and of what its runs compute up to their next calls.
        gain: of the group of calls computed last: the time of a call by itself, as a multiple of its time in
            the best batch; 1 where no batch pays.
    """

    runs: int = 0
    calls: Histogram = msgspec.field(default_factory=lambda: Histogram.over(ROWS))
    step_s: Histogram = msgspec.field(default_factory=lambda: Histogram.over(SECONDS))
    gain: float = 1.0


class GuideMeters(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of a worker's queue of guides (constrained decoding).

    Attributes:
        waiting: guides that wait to be checked.
        invalid: requests refused because of their guide.
        turned_away: requests refused because of the queue's length or their tenant's budget.
        cpu_s: the processor time of a check, or of compiling a guide again, in seconds.
    """

    waiting: int = 0
    invalid: int = 0
    turned_away: int = 0
    cpu_s: Histogram = msgspec.field(default_factory=lambda: Histogram.over(SECONDS))


class WorkerMeters(msgspec.Struct, frozen=True, kw_only=True):
    """All counters of a worker.

    Attributes:
        sequences: sequences that the engine has added to its batches.
        computed_tokens: positions that the model computed, of prompts and answers.
        sampled_tokens: tokens that the model sampled.
        batch_rows: sequences per step.
        step_s: the duration of a step, from scheduling to its sampled tokens.
        stepped: by name, the nodes that run in steps.
    """

    log: LogStats
    sequences: int
    computed_tokens: int
    sampled_tokens: int
    batch_rows: Histogram
    step_s: Histogram
    tensors: TensorMeters = TensorMeters()
    edges: EdgeMeters = EdgeMeters()
    prefix: PrefixMeters = PrefixMeters()
    guides: GuideMeters = msgspec.field(default_factory=GuideMeters)
    encoders: EncoderMeters = EncoderMeters()
    stepped: dict[str, StepMeters] = {}


class ConductorMeters(msgspec.Struct, frozen=True, kw_only=True):
    """All counters of a conductor.

    Attributes:
        folded: events read from the log and folded, including the log's history at the start.
        decisions: published decisions.
        ended_readers: readers of the log that were ended because their key had too many.
    """

    log: LogStats
    folded: int
    decisions: int
    ended_readers: int = 0
