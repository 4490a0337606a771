"""Orders from the conductor to a worker: execute a step, or stop it."""

from typing import Any

import msgspec

from shared.adapters import Adapter
from shared.events.base import Event
from shared.tensors import Handle


class WalkCall(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A walk to run, with tensors as handles and all else as plain values."""

    name: str
    inputs: dict[str, Handle] = {}
    args: dict[str, Any] = {}

    @property
    def choice(self) -> int:
        """The index of the answer that the walk computes, for a request with several answers."""
        return int(self.args.get("choice", 0))


class NodeReady(Event, frozen=True, kw_only=True, omit_defaults=True, tag="node.ready.v1", tag_field="type"):
    """An order to a rank: run its nodes of these walks, one walk after the other.

    The event is the decision and the dispatch in one. Each rank that hosts a node of the walks receives all
    walks. It runs its own nodes, and receives the other nodes' results from their ranks (`NodeFired`).

    Attributes:
        rank: the rank that executes the order; `incarnation` is its incarnation.
        index: the index of the step in the plan run, from 0.
        placement: the rank of each node.
        walk_placement: by walk and node, the rank of a node that runs elsewhere in that walk.
        lives: the incarnation of each rank that the request is placed on, if there are several.
        partition: the sub-plan that the step belongs to; empty for the plan itself.
        ends: streams that end with this step.
        on_probation: the request is quarantined, because a worker died while it ran: the rank reports the
            start (`walk.begun`) and the first progress (`walk.progressed`).
        weights_since: the first attempt with the present weights, if the request was begun with others:
            output of earlier attempts must not exist, and a rank that finds some fails the step.
        priority: the order of requests in the rank's engine, together with `tenant` and `deadline_ns`.
        deadline_ns: by the log's clock.
        cache_salt: keys and values are shared only between requests with the same one.
        adapter: the LoRA adapter to compute with, which the rank loads when it reads the order.
        history: the digest of all facts of the request folded so far. A replay computes it again.
    """

    rank: int
    model: str
    walks: list[WalkCall]
    placement: dict[str, int]
    origin: str
    seed: int
    reason: str
    history: bytes
    walk_placement: dict[str, dict[str, int]] = {}
    lives: dict[int, int] = {}
    partition: str = ""
    ends: list[str] = []
    on_probation: bool = False
    weights_since: int = 0
    priority: int = 0
    tenant: str = ""
    deadline_ns: int | None = None
    cache_salt: str | None = None
    adapter: Adapter | None = None


class WalkStop(Event, frozen=True, kw_only=True, omit_defaults=True, tag="walk.stop.v1", tag_field="type"):
    """An order to a rank to stop the step `index` of this attempt and to drop its state."""

    rank: int
    reason: str
    history: bytes
