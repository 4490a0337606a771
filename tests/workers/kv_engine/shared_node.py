"""A node shared by engines in one process: the test drives the leader, the followers run in threads."""

import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
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
    """The leader, and its first follower.

    Attributes:
        line: the leader's end of the connection to that follower.
        ended: what ended a follower.
    """

    leader: KVEngine
    follower: FollowerEngine
    line: Connection
    ended: Exception | None = None


def parts(family: Family, members: int = 2) -> list[DecoderLM]:
    """The members' parts of a tiny model."""
    return parts_of(tiny_checkpoint(family), members)


def parts_of(checkpoint: Path, members: int) -> list[DecoderLM]:
    """The members' parts of a checkpoint; the whole node for a single one."""
    if members == 1:
        return [load(checkpoint)]
    return [load(checkpoint, peers=member) for member in Circle(members).members()]


@contextmanager
def shared(nodes: list[DecoderLM], sizes: Mapping[str, Any]) -> Iterator[Shared]:
    """Engines over all parts, at work; `sizes` are the leader's. `follower` and `line` are the first's."""
    with ExitStack() as stack:
        ends = [stack.enter_context(lines()) for _ in nodes[1:]]
        leader, *followers = together(
            [
                partial(_leading, nodes[0], Followers([one for one, _ in ends]), dict(sizes)),
                *(
                    partial(_following, node, Leader(one), dict(sizes))
                    for node, (_, one) in zip(nodes[1:], ends, strict=True)
                ),
            ]
        )
        assert isinstance(leader, KVEngine)
        assert isinstance(followers[0], FollowerEngine)
        found = Shared(leader, followers[0], ends[0][0])

        def run(follower: KVEngine | FollowerEngine, to_leader: Connection) -> None:
            assert isinstance(follower, FollowerEngine)
            try:
                follower.run()
            except GroupLostError as error:
                found.ended = error
            finally:
                to_leader.close()

        threads = [
            Thread(target=run, args=(follower, one))
            for follower, (_, one) in zip(followers, ends, strict=True)
        ]
        for thread in threads:
            thread.start()
        try:
            yield found
        finally:
            for to_follower, _ in ends:
                to_follower.close()
            for thread in threads:
                thread.join()


def _leading(node: DecoderLM, followers: Followers, sizes: dict[str, Any]) -> KVEngine | FollowerEngine:
    blocks = followers.agree(sizes.pop("num_blocks"), node.dtype)
    sizes.pop("follower_capture", None)
    return make_engine(node, num_blocks=blocks, followers=followers, **sizes)


def _following(node: DecoderLM, leader: Leader, sizes: dict[str, Any]) -> KVEngine | FollowerEngine:
    blocks = leader.agree(10_000, node.dtype)
    states = sizes["max_sequences"] + sizes.get("state_snapshots", DEFAULT_STATE_SNAPSHOTS)
    return FollowerEngine(
        node,
        num_blocks=blocks,
        block_size=sizes["block_size"],
        max_step_tokens=sizes["max_step_tokens"],
        max_sequences=sizes["max_sequences"],
        leader=leader,
        states=states,
        capture=sizes.get("follower_capture"),
    )
