"""Events from rank to rank within one request: node results, stream items, and flow control."""

import msgspec

from shared.events.base import Event
from shared.events.outputs import TokenLogprobs
from shared.tensors import Handle


class SequenceHandover(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A KV engine's sequence on its way to the rank that continues it.

    Attributes:
        kv: keys and values of the leading tokens, (layers, 2, tokens, kv_heads, head_dim).
        token_ids: the tokens generated so far, none of which has been emitted.
        logprobs: one entry per generated token, if requested.
        prompt_scores: scores of all prompt tokens but the first, if requested: int32 (tokens, 1 + top, 2),
            for the token and then the likeliest ones, each an id and the bits of a float32.
    """

    kv: Handle
    token_ids: list[int]
    logprobs: list[TokenLogprobs] = []
    prompt_scores: Handle | None = None


class NodeFired(Event, frozen=True, kw_only=True, omit_defaults=True, tag="node.fired.v1", tag_field="type"):
    """A node of a walk ran on one rank. The event goes to every other rank that executes part of the step.

    So each of them knows the state of the whole walk (ADR 7). A firing (one execution of a node) is
    identified by the walk's position in the order, the node, and its path (the iteration of each enclosing
    loop). So a duplicate is not taken for the next iteration.

    Attributes:
        index: the index of the step.
        walk: the position of the walk among the order's walks, from 0.
        outputs: the node's values, by edge.
        stops: loops that end after the current iteration.
        row: the sequence of a KV node that the receiving rank continues in a later walk of the order.
        to_life: the incarnation of the receiving rank; a later incarnation ignores the event.
    """

    walk: int
    node: str
    path: tuple[int, ...]
    outputs: dict[str, Handle] = {}
    stops: list[str] = []
    row: SequenceHandover | None = None
    to_life: int | None = None


class StreamSent(
    Event, frozen=True, kw_only=True, omit_defaults=True, tag="stream.sent.v1", tag_field="type"
):
    """Items of a stream, from its producer's rank to its consumer's rank.

    Attributes:
        index: the number of the first item, from 0.
        stream: the edge's name.
        to: the consuming node.
        items: a tensor whose first dimension counts the items; None in an event that only ends the stream.
        end: no item follows.
        to_life: as in `NodeFired`.
    """

    stream: str
    to: str
    items: Handle | None = None
    end: bool = False
    to_life: int | None = None


class StreamTaken(
    Event, frozen=True, kw_only=True, omit_defaults=True, tag="stream.taken.v1", tag_field="type"
):
    """Flow-control credit, from a stream's consumer to its producer: the number of items consumed so far.

    Attributes:
        closed: the consumer finished before the stream did and reads no further item. The producer keeps no
            items, sends none, and waits for no credit.
        to_life: as in `NodeFired`.
    """

    stream: str
    to: str
    taken: int
    closed: bool = False
    to_life: int | None = None


class TensorsReleased(
    Event, frozen=True, kw_only=True, omit_defaults=True, tag="tensors.released.v1", tag_field="type"
):
    """A hint to the rank that owns the tensors `keys`: they were read and will not be read again.

    Attributes:
        to_life: as in `NodeFired`.
    """

    keys: list[str]
    to_life: int | None = None
