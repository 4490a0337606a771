"""Streams: which walks of a model stream into which, and whether both ends agree.

A stream is known by its name and the node that takes it. A walk is compiled by itself; what is between
two of them is found here, when the model's graph is built.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from shared.walks.chunks import AfterEnd, ChunkPolicy
from shared.walks.compiled import CompiledWalk, InputPort
from shared.walks.errors import WalkError
from shared.walks.language import StreamingEdge


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamLink:
    """One stream.

    Attributes:
        policy: how its items are cut.
        after_end: what comes behind its final chunk.
        only: which items go along, from the first up to, not including, the second; None: all.
        feeders: the walks that make its items, each with the node that does.
        consumer_walk: the walk with the node that takes it.
    """

    policy: ChunkPolicy
    after_end: AfterEnd
    only: tuple[int, int] | None
    feeders: tuple[tuple[str, str], ...]
    consumer_walk: str


def link_streams(walks: Mapping[str, CompiledWalk]) -> dict[InputPort, StreamLink]:
    """Every stream between these walks, by its name and the node that takes it.

    Raises:
        WalkError: a stream that nothing feeds, that nobody or more than one takes, whose edges differ, or
            whose consumer would wait for it when it is over.
    """
    consumers = _consumers(walks)
    edges: dict[InputPort, StreamingEdge] = {}
    feeders: dict[InputPort, list[tuple[str, str]]] = {}
    for walk_name, walk in walks.items():
        for node in walk.node_table:
            for edge in node.streaming:
                pair, where = (edge.name, edge.to), f"walk {walk_name!r}: node {node.name!r}"
                if pair not in consumers:
                    raise WalkError(_no_consumer(where, edge, walks, consumers))
                if (first := edges.setdefault(pair, edge)) != edge:
                    raise WalkError(
                        f"{where} streams {edge.name!r} to node {edge.to!r} as {edge}, and walk "
                        f"{feeders[pair][0][0]!r} as {first}; one stream is cut in one way: use one edge"
                    )
                feeders.setdefault(pair, []).append((walk_name, node.name))
    for (name, to), taker in consumers.items():
        if (name, to) not in edges:
            raise WalkError(
                f"walk {taker!r}: node {to!r} takes the stream {name!r}, but no other walk feeds it; "
                f"list StreamingEdge({name!r}, {to!r}, ...) in the node that does"
            )
        if edges[name, to].after_end == "stop" and len(_around(walks[taker], to)) > 1:
            raise WalkError(
                f"walk {taker!r}: node {to!r} takes the stream {name!r} inside of the loops "
                f"{_around(walks[taker], to)}; its end stops the innermost, and the next would begin it "
                'again, where no chunk is left: put the node into one loop, or use after_end="empty"'
            )
    return {
        pair: StreamLink(
            policy=edge.chunks,
            after_end=edge.after_end,
            only=edge.only,
            feeders=tuple(feeders[pair]),
            consumer_walk=consumers[pair],
        )
        for pair, edge in edges.items()
    }


def _consumers(walks: Mapping[str, CompiledWalk]) -> dict[InputPort, str]:
    """The walk that takes each stream."""
    consumers: dict[InputPort, str] = {}
    for walk_name, walk in walks.items():
        for index in walk.stream_consumers:
            node = walk.node_table[index]
            for name in node.streams:
                other = consumers.setdefault((name, node.name), walk_name)
                if other != walk_name:
                    raise WalkError(
                        f"walks {sorted((other, walk_name))} both take the stream {name!r} with node "
                        f"{node.name!r}; a stream has one consumer: take it in one of them"
                    )
    return consumers


def _around(walk: CompiledWalk, node: str) -> list[str]:
    """The loops around a node, outermost first."""
    return [walk.loop_table[loop].name for loop in walk.loop_table[walk.nodes[node].loop].lineage]


def _no_consumer(
    where: str, edge: StreamingEdge, walks: Mapping[str, CompiledWalk], consumers: Mapping[InputPort, str]
) -> str:
    known = sorted({node for walk in walks.values() for node in walk.nodes})
    taken = sorted(name for name, node in consumers if node == edge.to)
    hint = f"takes the streams {taken}" if edge.to in known else f"is unknown; the nodes are {known}"
    return (
        f"{where} streams {edge.name!r} to node {edge.to!r}, which {hint}; list "
        f"Stream({edge.name!r}) among the inputs of the node that is to take it"
    )
