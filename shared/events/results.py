"""Events about the execution of a step, from a worker to the conductor."""

from typing import Any

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


class WalkCompleted(
    Event, frozen=True, kw_only=True, omit_defaults=True, tag="walk.completed.v1", tag_field="type"
):
    """A rank completed its part of a step. All its chunks are stored before this event.

    Attributes:
        results: one per walk of the order, with the results of this rank's nodes.
        output: the totals so far of the unnamed track.
        tracks: the totals so far of each named track.
        streams: the totals of each stream that the rank consumed.
    """

    rank: int
    results: list[WalkResult]
    output: OutputTotals = OutputTotals()
    durations_s: dict[str, float] = {}
    tracks: dict[str, OutputTotals] = {}
    streams: dict[str, StreamTotals] = {}


class WalkFailed(
    Event, frozen=True, kw_only=True, omit_defaults=True, tag="walk.failed.v1", tag_field="type"
):
    """A rank could not complete its part of a step.

    Attributes:
        gone: the key of a tensor whose bytes no longer exist (`failure.code` is `tensor_gone`). Its producer
            has to run again.
        gone_rank: the rank that held the bytes.
        gone_life: the incarnation of that rank.
    """

    rank: int
    failure: Failure
    gone: str | None = None
    gone_rank: int | None = None
    gone_life: int | None = None


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
    """

    rank: int
    steps_after: int
    tokens: int = 0
