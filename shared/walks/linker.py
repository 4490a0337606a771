"""The streams between the walks of a model, and the check that both ends of each agree.

Each walk is compiled on its own. The model's graph then links the walks. A stream is identified by its name
and its consuming node.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from shared.walks.chunks import AfterEnd, ChunkPolicy
from shared.walks.compiled import CompiledWalk, InputPort
from shared.walks.errors import WalkError
from shared.walks.language import StreamingEdge


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamLink:
    """A stream between walks.

    Attributes:
        policy: the division of its items into chunks.
        after_end: the behaviour after the final chunk.
        only: the half-open range of items that are sent; None means all.
        producers: the producing walks, each with its producing node.
        consumer_walk: the walk of the consuming node.
    """

    policy: ChunkPolicy
    after_end: AfterEnd
    only: tuple[int, int] | None
    producers: tuple[tuple[str, str], ...]
    consumer_walk: str


def link_streams(walks: Mapping[str, CompiledWalk]) -> dict[InputPort, StreamLink]:
    """Return all streams between these walks, by name and consuming node.

    Raises:
        WalkError: a stream has no producer, not exactly one consumer, or unequal edges; or its consumer would
            wait for it after its end.
    """
    consumers = _consumers(walks)
    edges: dict[InputPort, StreamingEdge] = {}
    producers: dict[InputPort, list[tuple[str, str]]] = {}
    for walk_name, walk in walks.items():
        for node in walk.node_table:
            for edge in node.streaming:
                pair, where = (edge.name, edge.to), f"walk {walk_name!r}: node {node.name!r}"
                if pair not in consumers:
                    raise WalkError(_no_consumer(where, edge, walks, consumers))
                if (first := edges.setdefault(pair, edge)) != edge:
                    raise WalkError(
                        f"{where} streams {edge.name!r} to node {edge.to!r} as {edge}, and walk "
                        f"{producers[pair][0][0]!r} as {first}; one stream is cut in one way: use one edge"
                    )
                producers.setdefault(pair, []).append((walk_name, node.name))
    for (name, to), consumer in consumers.items():
        if (name, to) not in edges:
            raise WalkError(
                f"walk {consumer!r}: node {to!r} takes the stream {name!r}, but no other walk feeds it; "
                f"list StreamingEdge({name!r}, {to!r}, ...) in the producing node"
            )
        if edges[name, to].after_end == "stop" and len(_loops_around(walks[consumer], to)) > 1:
            raise WalkError(
                f"walk {consumer!r}: node {to!r} takes the stream {name!r} inside of the loops "
                f"{_loops_around(walks[consumer], to)}; the stream's end stops the innermost loop, and the "
                "outer one would start it again without any chunk left: put the node into one loop, or use "
                'after_end="empty"'
            )
    return {
        pair: StreamLink(
            policy=edge.chunks,
            after_end=edge.after_end,
            only=edge.only,
            producers=tuple(producers[pair]),
            consumer_walk=consumers[pair],
        )
        for pair, edge in edges.items()
    }


def _consumers(walks: Mapping[str, CompiledWalk]) -> dict[InputPort, str]:
    """Return the consuming walk of each stream."""
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


def _loops_around(walk: CompiledWalk, node: str) -> list[str]:
    """Return the loops around a node, outermost first."""
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
