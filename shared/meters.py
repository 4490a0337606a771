"""What a process has counted, as its beats tell it: under `meters`, beside the facts `/health` shows.

Totals since the process began, so that a beat that is lost loses nothing. A gateway shows the last ones it
heard at `/metrics`; there a total that begins anew is a process that was started again.
"""

import msgspec

from shared.log.port import LogStats
from shared.telemetry.histogram import Histogram


class TensorMeters(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's tensors that others may read.

    Attributes:
        total_bytes, free_bytes: of the arena, and `slots` what is taken of it now.
        puts, gets: tensors that were put, and looked at.
        gone: looked for, and not there any more.
        refused: handles and requests that cannot be right.
        fetched_bytes: read from other workers.
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
    """What a worker and others have told one another, and what its streams came to.

    Attributes:
        told, heard: events for other ranks, and from them.
        early: of those heard, what waits for its order now; `early_bytes` as events.
        items: of streams, made here; `chunks` taken here.
    """

    told: int = 0
    heard: int = 0
    early: int = 0
    early_bytes: int = 0
    items: int = 0
    chunks: int = 0


class PrefixMeters(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker's engine has not computed again, or had to, or ahead.

    Attributes:
        asked: tokens of sequences that were let in; `hit`, those whose keys and values were cached.
        kept: tokens that are cached now and in nobody's use: room for whoever needs it.
        preempted: how often a sequence had to give its blocks back, to go on later.
        guessed: tokens that were guessed ahead; `stood`, those that were the model's own.
    """

    asked: int = 0
    hit: int = 0
    kept: int = 0
    preempted: int = 0
    guessed: int = 0
    stood: int = 0


class WorkerMeters(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's.

    Attributes:
        sequences: how many the engine has taken into its batches.
        computed_tokens: positions that were run through the model, prompts' and answers'.
        sampled_tokens: tokens that came out of it.
        batch_rows: sequences in a step; `step_s` what it took, from choosing them to having their tokens.
        tensors: those others may read; `edges` what was told from rank to rank; `prefix` what the engine has
            not computed again.
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


class ConductorMeters(msgspec.Struct, frozen=True, kw_only=True):
    """A conductor's.

    Attributes:
        folded: events it has read from the log and folded, the log's whole past included.
        decisions: decisions it has published.
    """

    log: LogStats
    folded: int
    decisions: int
