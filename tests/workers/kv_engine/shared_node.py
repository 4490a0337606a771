"""A node shared by two engines in one process: the test drives the leader, the follower runs in a thread."""

import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from threading import Thread
from typing import Any

from models.decoder_lm.nodes import DecoderLM, load
from tests.peers import Circle, together
from tests.tiny import Family, tiny_checkpoint
from tests.workers.kv_engine.engines import make_engine
from workers.kv_engine.config import DEFAULT_STATE_SNAPSHOTS
from workers.kv_engine.engine import KVEngine
from workers.kv_engine.parallel.connection import Connection, GroupLostError
from workers.kv_engine.parallel.follower import FollowerEngine
from workers.kv_engine.parallel.lockstep import Followers, Leader


@contextmanager
def lines() -> Iterator[tuple[Connection, Connection]]:
    """Both ends of a connection: the leader's, and the follower's."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname()[:2])
        other, _ = server.accept()
    ends = Connection(one, "the follower"), Connection(other, "the leader")
    try:
        yield ends
    finally:
        for end in ends:
            end.close()


@dataclass(slots=True)
class Shared:
    """Both engines.

    Attributes:
        line: the leader's end.
        ended: what ended the follower.
    """

    leader: KVEngine
    follower: FollowerEngine
    line: Connection
    ended: Exception | None = None


def parts(family: Family) -> list[DecoderLM]:
    """Both members' parts of a tiny model."""
    return [load(tiny_checkpoint(family), peers=member) for member in Circle(2).members()]


@contextmanager
def shared(nodes: list[DecoderLM], sizes: Mapping[str, Any]) -> Iterator[Shared]:
    """Engines over both parts, at work; `sizes` are the leader's."""
    with lines() as (to_follower, to_leader):
        leader, follower = together(
            [
                partial(_leading, nodes[0], Followers([to_follower]), dict(sizes)),
                partial(_following, nodes[1], Leader(to_leader), dict(sizes)),
            ]
        )
        assert isinstance(leader, KVEngine)
        assert isinstance(follower, FollowerEngine)
        found = Shared(leader, follower, to_follower)

        def run() -> None:
            try:
                follower.run()
            except GroupLostError as error:
                found.ended = error
            finally:
                to_leader.close()

        thread = Thread(target=run)
        thread.start()
        try:
            yield found
        finally:
            to_follower.close()
            thread.join()


def _leading(node: DecoderLM, followers: Followers, sizes: dict[str, Any]) -> KVEngine | FollowerEngine:
    blocks = followers.agree(sizes.pop("num_blocks"), node.dtype)
    return make_engine(node, num_blocks=blocks, followers=followers, **sizes)


def _following(node: DecoderLM, leader: Leader, sizes: dict[str, Any]) -> KVEngine | FollowerEngine:
    blocks = leader.agree(10_000, node.dtype)
    states = sizes["max_sequences"] + sizes.get("state_snapshots", DEFAULT_STATE_SNAPSHOTS)
    return FollowerEngine(
        node, num_blocks=blocks, block_size=sizes["block_size"], leader=leader, states=states
    )
