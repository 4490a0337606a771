"""Placement of one order: the rank of each node in its walks, and the roles that follow for this rank.

Roles are: the output tracks this rank writes, the ranks that produce and consume each stream, the ranks that
a sequence moves between. Pure: all of it follows from the order and the model's graph, so every rank of the
step derives the same.
"""

from collections.abc import Mapping
from typing import Final

from configs.placement import rank_of
from models.base import TOKEN, EngineKind, ModelGraph
from models.sequence_request import PROMPT_OUTPUT_ARGS
from shared.errors import BugError
from shared.events import NodeReady
from shared.walks import CompiledNode, CompiledWalk, InputPort, StreamLink, ToClient
from shared.walks.compiled import Route

PROMPT: Final = "token_ids"
"""The input of a KV node that holds the prompt of its sequence."""


class GraphOutputs:
    """The output nodes of a model's graph, computed once for all orders.

    Attributes:
        tracks: by output node, the name of its track.
        output_nodes: by walk, the nodes that send values to the client.
    """

    def __init__(self, graph: ModelGraph) -> None:
        self.graph: Final = graph
        self.tracks: Final[Mapping[str, str]] = graph.tracks
        self.output_nodes: Final[Mapping[str, tuple[str, ...]]] = {
            name: tuple(node.name for node in walk.node_table if _has_output(node))
            for name, walk in graph.walks.items()
        }


class StepPlacement:
    """The placement of one order's walks; `ready` is the order.

    Attributes:
        is_single_rank: the whole request runs on this rank.
        peer_ranks: the other ranks of the step.
        tracks: by output node, the tracks that this rank writes in this step. If a sequence moves between
            ranks, the last rank writes its track.
    """

    def __init__(self, outputs: GraphOutputs, ready: NodeReady) -> None:
        graph = outputs.graph
        if unknown := [call.name for call in ready.walks if call.name not in graph.walks]:
            raise BugError(
                f"order of walk {unknown[0]!r}: expected a walk of {graph.family}, "
                f"one of {sorted(graph.walks)}"
            )
        self.rank = ready.rank
        self.walks: tuple[CompiledWalk, ...] = tuple(graph.walks[call.name] for call in ready.walks)
        self.is_single_rank = not ready.lives
        self._outputs = outputs
        self._graph = graph
        self._ready = ready
        self._streams: Mapping[InputPort, StreamLink] = graph.streams
        self._output_nodes = self._find_output_nodes()
        self.peer_ranks: tuple[int, ...] = () if self.is_single_rank else self._find_peer_ranks()
        self.tracks: dict[str, str] = (
            {node: outputs.tracks[node] for node in self._output_nodes}
            if self.is_single_rank
            else self._find_tracks()
        )

    def rank_of(self, walk: str, node: str) -> int:
        """The rank that runs a node in a walk."""
        if self.is_single_rank:
            return self.rank
        try:
            return rank_of(self._ready.placement, self._ready.walk_placement, walk, node)
        except KeyError:
            raise BugError(
                f"walk {walk!r}: expected the order to place node {node!r} on a rank; "
                f"it places {sorted(self._ready.placement)}"
            ) from None

    def local_nodes(self, walk: CompiledWalk) -> frozenset[str]:
        """The nodes of a walk that this rank runs."""
        return frozenset(node for node in walk.nodes if self.rank_of(walk.name, node) == self.rank)

    def _find_peer_ranks(self) -> tuple[int, ...]:
        ranks = {self.rank_of(walk.name, node) for walk in self.walks for node in walk.nodes}
        return tuple(sorted(ranks - {self.rank}))

    # ---- output ------------------------------------------------------------------------------------
    def _find_tracks(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for walk in self.walks:
            for node in self._output_nodes & walk.nodes.keys():
                if self.rank_of(walk.name, node) == self.rank:
                    found[node] = self._outputs.tracks[node]
                elif self._graph.nodes[node] is EngineKind.KV:
                    found.pop(node, None)
        return found

    @property
    def kept(self) -> dict[str, frozenset[str]]:
        """By output node of this rank, the modalities in which released values stand."""
        found = {
            node: frozenset(
                route.to.modality
                for walk in self.walks
                if node in walk.nodes
                for route in walk.nodes[node].routes
                if route.keeps_released and isinstance(route.to, ToClient)
            )
            for node in self.tracks
        }
        return {node: modalities for node, modalities in found.items() if modalities}

    def track_of(self, node: str) -> str:
        """The track of an output node."""
        return self._outputs.tracks[node]

    def emits_output(self, node: str) -> bool:
        """True for a node whose output goes to the client in this step.

        A KV node counts as one, too, when it emits an echo or an embedding, or only warms the prefix cache.
        """
        return node in self._output_nodes

    def _find_output_nodes(self) -> set[str]:
        found: set[str] = set()
        for walk, call in zip(self.walks, self._ready.walks, strict=True):
            found.update(self._outputs.output_nodes[walk.name])
            if not PROMPT_OUTPUT_ARGS.isdisjoint(call.args):
                found.update(node for node in walk.nodes if self._graph.nodes[node] is EngineKind.KV)
        return found

    def is_only_writer(self, node: str) -> bool:
        """True if no other rank writes the node's track, in any walk of the model."""
        return self.is_single_rank or all(
            self.rank_of(walk, node) == self.rank
            for walk, output_nodes in self._outputs.output_nodes.items()
            if node in output_nodes
        )

    # ---- values ------------------------------------------------------------------------------------
    def is_read_by_peers(self, walk_index: int, route: Route) -> bool:
        """True if another rank reads a route's value, in that walk or in a later one of the step.

        Another rank also reads the prompt of a sequence that is handed over in this step.
        """
        if isinstance(route.to, str):
            reader = self.rank_of(self.walks[walk_index].name, route.to)
            return reader != self.rank or (route.edge == PROMPT and self.is_handed_over(route.to))
        return any(
            self.rank_of(walk.name, node) != self.rank
            for walk in self.walks[walk_index + 1 :]
            for node in walk.consumers.get(route.edge, ())
        )

    # ---- sequences of KV nodes ---------------------------------------------------------------------
    def first_index(self, node: str) -> int:
        """The index of the step's first walk that includes a node."""
        return next(index for index, walk in enumerate(self.walks) if node in walk.nodes)

    def next_rank(self, walk_index: int, node: str) -> int | None:
        """The rank that continues a node's sequence after a walk; None where the sequence ends with it."""
        later = (walk for walk in self.walks[walk_index + 1 :] if node in walk.nodes)
        following = next(later, None)
        return None if following is None else self.rank_of(following.name, node)

    @property
    def may_resume(self) -> bool:
        """True if a checkpoint may concern this rank: of a run on it, or of a loop over any ranks."""
        return any(walk.checkpoints for walk in self.walks) or any(
            self._graph.nodes[node] is not EngineKind.CPU and self.rank_of(walk.name, node) == self.rank
            for walk in self.walks
            for node in walk.nodes
        )

    def is_handed_over(self, node: str) -> bool:
        """True if a KV node's sequence moves from one rank to another in this step."""
        if self.is_single_rank or self._graph.nodes[node] is not EngineKind.KV:
            return False
        return len({self.rank_of(walk.name, node) for walk in self.walks if node in walk.nodes}) > 1

    # ---- streams -----------------------------------------------------------------------------------
    def tensor_streams(self, node: str) -> list[InputPort]:
        """The streams that take tensors of a KV node's sequence in this step."""
        walks = (walk for walk in self.walks if node in walk.nodes)
        edges = (edge for walk in walks for edge in walk.nodes[node].streaming)
        return list(dict.fromkeys((edge.name, edge.to) for edge in edges if edge.name != TOKEN))

    def stream_taken(self, node: str) -> InputPort | None:
        """The stream that a KV node's sequence takes in this step."""
        walks = (walk for walk in self.walks if node in walk.nodes)
        return next(((name, node) for walk in walks for name in walk.nodes[node].streams), None)

    def consumer_rank(self, stream: InputPort) -> int:
        """The rank that consumes a stream."""
        return self.rank_of(self._streams[stream].consumer_walk, stream[1])

    def producer_ranks(self, stream: InputPort) -> frozenset[int]:
        """The ranks that may produce a stream's items."""
        return frozenset(self.rank_of(walk, node) for walk, node in self._streams[stream].producers)

    @property
    def streams_to_end(self) -> tuple[InputPort, ...]:
        """The streams that this rank has to end when the step's walks are done.

        A stream is ended by the rank that produced its last items in this step; if none did, by the lowest
        rank of the step.
        """
        if not self._ready.ends:
            return ()
        named = [stream for stream in self._streams if stream[0] in self._ready.ends]
        if missing := set(self._ready.ends) - {name for name, _ in named}:
            raise BugError(
                f"order to end stream {min(missing)!r}: expected a stream of {self._graph.family}, "
                f"one of {sorted({name for name, _ in self._streams})}"
            )
        return tuple(stream for stream in named if self._ending_rank(stream) == self.rank)

    def _ending_rank(self, stream: InputPort) -> int:
        producers = [
            self.rank_of(walk.name, node.name)
            for walk in self.walks
            for node in walk.node_table
            if any((edge.name, edge.to) == stream for edge in node.streaming)
        ]
        return producers[-1] if producers else min((self.rank, *self.peer_ranks))


def _has_output(node: CompiledNode) -> bool:
    return any(isinstance(route.to, ToClient) for route in node.routes)
