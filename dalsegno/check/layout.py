"""The layout of a placement: the nodes of each rank, and the links between ranks. Pure.

    edge      a tensor of one walk, from node to node
    kept      a value that one walk keeps and a later one uses
    kv        a node's KV cache, which follows it to the rank of its next walk
    stream    items sent while both walks run

A graph does not fix the order of its walks, which is decided per request: a KV cache is shown from a node's
first walk, in the graph's order, to its others. The rank where the cache ends feeds the streams; an earlier
rank feeds none.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from configs.placement import PlacedGroup, home_of
from models.base import EngineKind, ModelGraph
from shared.walks import CompiledWalk, Keep, ToClient
from shared.walks.chunks import ChunkPolicy, Fixed, LeftContext, SlidingWindow

LinkKind: TypeAlias = Literal["edge", "kept", "kv", "stream"]
WalkNode: TypeAlias = tuple[str, str]
"""A walk, and a node in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlacement:
    """A node in some walks on some ranks: one line of the table. Replicas share a line."""

    node: str
    engine: EngineKind
    walks: tuple[str, ...]
    ranks: tuple[int, ...]
    puts_out: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A connection from one node of a walk to another; `chunks` describes how a stream is cut."""

    kind: LinkKind
    name: str
    source: WalkNode
    target: WalkNode
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    chunks: str = ""

    @property
    def leaves_its_rank(self) -> bool:
        """True if it may connect two ranks."""
        return len({*self.sources, *self.targets}) > 1

    @property
    def always_leaves(self) -> bool:
        """True if it connects two ranks whichever replicas a request uses."""
        return not {*self.sources} & {*self.targets}


def node_placements(graph: ModelGraph, groups: Sequence[PlacedGroup]) -> list[NodePlacement]:
    """Return every node's placements, in the graph's order."""
    found: list[NodePlacement] = []
    for node, engine in graph.nodes.items():
        for group in groups:
            walks = tuple(
                name
                for name, walk in graph.walks.items()
                if node in walk.nodes and home_of(groups, name, node) is group
            )
            if walks:
                found.append(
                    NodePlacement(
                        node=node,
                        engine=engine,
                        walks=walks,
                        ranks=tuple(group.ranks),
                        puts_out=_outputs_of(graph, node, walks),
                    )
                )
    return found


def links(graph: ModelGraph, groups: Sequence[PlacedGroup]) -> list[Link]:
    """Return all links between nodes of different groups, and all streams."""

    def link(kind: LinkKind, name: str, source: WalkNode, target: WalkNode, chunks: str = "") -> Link | None:
        one, other = home_of(groups, *source), home_of(groups, *target)
        if one is other and kind != "stream":
            return None
        return Link(
            kind=kind,
            name=name,
            source=source,
            target=target,
            sources=tuple(one.ranks),
            targets=tuple(other.ranks),
            chunks=chunks,
        )

    found = [link("kept", *one) for one in _kept(graph)]
    found += [
        link("edge", name, source, target)
        for walk, compiled in graph.walks.items()
        for name, source, target in _edges(walk, compiled)
    ]
    found += [link("kv", f"KV of {source[1]}", source, target) for source, target in _kv(graph)]
    for (name, to), stream in graph.streams.items():
        found += [
            link("stream", name, producer, (stream.consumer_walk, to), cut(stream.policy))
            for producer in stream.producers
            if not _moves_on(graph, groups, producer, stream.producers)
        ]
    return list(dict.fromkeys(one for one in found if one is not None))


def loops_over_ranks(
    graph: ModelGraph, groups: Sequence[PlacedGroup]
) -> Iterator[tuple[str, str, list[int]]]:
    """Yield each loop whose body runs on several ranks: the walk, the loop, the ranks."""
    for walk, compiled in graph.walks.items():
        for name, loop in compiled.loops.items():
            inside = {home_of(groups, walk, compiled.node_table[index].name) for index in loop.nodes}
            ranks = sorted({int(rank) for group in inside for rank in group.ranks})
            if len(inside) > 1 and len(ranks) > 1:
                yield walk, name, ranks


def cut(policy: ChunkPolicy) -> str:
    """Describe how a stream is cut."""
    match policy:
        case Fixed():
            return f"{policy.count} at a time"
        case SlidingWindow():
            return f"windows of {policy.window}, every {policy.stride}"
        case LeftContext():
            return f"{policy.count} at a time, with the {policy.context} before"


def places(groups: Sequence[PlacedGroup]) -> list[tuple[int, ...]]:
    """Group the ranks that run the same nodes."""
    same: dict[tuple[int, ...], list[int]] = {}
    for rank in sorted({rank for group in groups for rank in group.ranks}):
        same.setdefault(tuple(place for place, group in enumerate(groups) if rank in group.ranks), []).append(
            rank
        )
    return [tuple(ranks) for ranks in same.values()]


def _outputs_of(graph: ModelGraph, node: str, walks: Sequence[str]) -> tuple[str, ...]:
    routes = (route for walk in walks for route in graph.walks[walk].nodes[node].routes)
    return tuple(dict.fromkeys(route.to.modality for route in routes if isinstance(route.to, ToClient)))


def _edges(walk: str, compiled: CompiledWalk) -> Iterator[tuple[str, WalkNode, WalkNode]]:
    for node in compiled.node_table:
        for route in node.routes:
            if isinstance(route.to, str):
                yield route.edge, (walk, node.name), (walk, route.to)


def _kept(graph: ModelGraph) -> Iterator[tuple[str, WalkNode, WalkNode]]:
    """Yield each value that a walk keeps, and each other walk's node that uses it."""
    for walk, compiled in graph.walks.items():
        for node in compiled.node_table:
            for route in node.routes:
                if isinstance(route.to, Keep):
                    for other, taking in graph.walks.items():
                        for to in taking.consumers.get(route.edge, ()) if other != walk else ():
                            yield route.edge, (walk, node.name), (other, to)


def _moves_on(
    graph: ModelGraph, groups: Sequence[PlacedGroup], producer: WalkNode, producers: Sequence[WalkNode]
) -> bool:
    """True if the KV cache moves from `producer` to another producer of the stream, which then feeds it."""
    return any(
        source == producer
        and target in producers
        and home_of(groups, *source) is not home_of(groups, *target)
        for source, target in _kv(graph)
    )


def _kv(graph: ModelGraph) -> Iterator[tuple[WalkNode, WalkNode]]:
    for node, engine in graph.nodes.items():
        if engine is EngineKind.KV:
            first, *others = [name for name, walk in graph.walks.items() if node in walk.nodes]
            for other in others:
                yield (first, node), (other, node)
