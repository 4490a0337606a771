"""Events about the execution of a step, from a worker to the conductor."""

from typing import Any, Final

import msgspec

from shared.events.base import Event
from shared.events.decisions import Failure
from shared.events.outputs import OutputTotals
from shared.tensors import Handle


class WalkResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The result of one walk: facts that a plan may branch on, and handles that it may pass on unread."""

    name: str
    facts: dict[str, Any] = {}
    outputs: dict[str, Handle] = {}


class StreamTotals(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Counts of a stream. Together with its policy (`shared.walks.chunks`) they determine its chunks.

    Attributes:
        items: all items of the stream; with `left`, only the items in its chunks.
        left: the consumer finished before the stream did, without the final chunk.
    """

    items: int = 0
    chunks: int = 0
    left: bool = False


class Preemption(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A sequence gave its KV blocks back to another one, and was computed again.

    Attributes:
        at_s: seconds since the sequence was queued.
        by: the request that needed a block, or the first of those that kept theirs.
        tokens: how many of its tokens were computed again; 0 if all of them were still cached.
        waited_s: seconds until it had blocks again, or ended without.
    """

    at_s: float
    by: str = ""
    tokens: int = 0
    waited_s: float = 0.0


class NodeWork(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Work of one node in a step: its time, and the causes of its waits. No decision depends on it.

    All times are seconds. The fields after `took_s` are those of engines: a CPU node has only `waited_s`.

    Attributes:
        calls: the number of its calls.
        took_s: the sum of the durations of its calls, waits included.
        waited_s: from the queue to a first place in a batch, or to a thread.
        behind: the requests that had places, or came first, when it had to wait, at most `MAX_NAMED`.
        behind_count: their number.
        lacked: what it waited for: `places` in the batch, `kv_blocks`, or `prefix`, which another sequence
            was computing.
        first_token_s: from the queue to the first token.
        held_s: times in which it was held, because the log or a stream took no more of its output.
        steps: the engine steps while its sequence had a place, or the batches that computed its calls.
        rows: the mean number of sequences, runs or calls in them.
        cached_tokens: how many tokens of its prompt were in the prefix cache at its first admission.
        beside: by request, the tokens of prompts of others that were computed while it decoded, the most
            first, at most `MAX_NAMED`; empty if a stop string ended the answer before the engine knew.
        beside_s: the durations of the steps that computed those.
        preemptions: the first of them, at most `MAX_NAMED`.
        preemption_count: the number of all; `preempted_s` is the sum of all their waits.
        drafted: the tokens that speculative decoding drafted.
        accepted: how many of them the model chose, too: so many steps were saved.
        undrafted_steps: the steps without a draft because the measured costs and acceptance were against one.
    """

    calls: int = 0
    took_s: float = 0.0
    waited_s: float = 0.0
    behind: list[str] = []
    behind_count: int = 0
    lacked: str = ""
    first_token_s: float = 0.0
    held_s: float = 0.0
    steps: int = 0
    rows: float = 0.0
    cached_tokens: int = 0
    beside: dict[str, int] = {}
    beside_s: float = 0.0
    preemptions: list[Preemption] = []
    preemption_count: int = 0
    preempted_s: float = 0.0
    drafted: int = 0
    accepted: int = 0
    undrafted_steps: int = 0


MAX_NAMED: Final = 8
"""The most requests, or preemptions, that `NodeWork` names; further ones are only counted."""


class WalkCompleted(
    Event, frozen=True, kw_only=True, omit_defaults=True, tag="walk.completed.v1", tag_field="type"
):
    """A rank completed its part of a step. All its chunks are stored before this event.

    Attributes:
        results: one per walk of the order, with the results of this rank's nodes.
        output: the totals so far of the unnamed track.
        tracks: the totals so far of each named track.
        streams: the totals of each stream that the rank consumed.
        work: the work of this rank's nodes, by name. Empty in logs that are older than the field.
    """

    rank: int
    results: list[WalkResult]
    output: OutputTotals = OutputTotals()
    durations_s: dict[str, float] = {}
    tracks: dict[str, OutputTotals] = {}
    streams: dict[str, StreamTotals] = {}
    work: dict[str, NodeWork] = {}


class WalkFailed(
    Event, frozen=True, kw_only=True, omit_defaults=True, tag="walk.failed.v1", tag_field="type"
):
    """A rank could not complete its part of a step.

    Attributes:
        gone: the key of a tensor whose bytes no longer exist (`failure.code` is `tensor_gone`). Its producer
            has to run again.
        gone_rank: the rank that held the bytes.
        gone_life: the incarnation of that rank.
        work: as in `WalkCompleted`, up to the failure.
    """

    rank: int
    failure: Failure
    gone: str | None = None
    gone_rank: int | None = None
    gone_life: int | None = None
    work: dict[str, NodeWork] = {}


class WalkBegun(Event, frozen=True, kw_only=True, omit_defaults=True, tag="walk.begun.v1", tag_field="type"):
    """A quarantined step is about to start. The event is stored before any of the step runs.

    If the worker dies before that, the step did not cause it.
    """

    rank: int


class WalkProgressed(
    Event, frozen=True, kw_only=True, omit_defaults=True, tag="walk.progressed.v1", tag_field="type"
):
    """A quarantined step got further than when a worker died under it: it did not cause that death.

    Attributes:
        tokens: the number of tokens of the answer so far.
    """

    rank: int
    tokens: int = 0


class WalkStopped(
    Event, frozen=True, kw_only=True, omit_defaults=True, tag="walk.stopped.v1", tag_field="type"
):
    """A rank executed a `walk.stop`.

    Attributes:
        steps_after: the number of engine steps that still contained the sequence after the order was read.
        work: as in `WalkCompleted`, up to the stop.
    """

    rank: int
    steps_after: int
    tokens: int = 0
    work: dict[str, NodeWork] = {}
