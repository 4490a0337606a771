"""An order's walks, and which rank runs what of them.

Pure: it follows from the order and the model's graph alone, so every rank of a step says the same.
"""

from collections.abc import Mapping
from typing import Final

from configs.placement import rank_of
from models.base import EngineKind, ModelGraph
from shared.errors import BugError
from shared.events import NodeReady
from shared.walks import Client, CompiledNode, CompiledWalk, InputPort, StreamInfo
from shared.walks.compiled import Route

PROMPT: Final = "token_ids"
"""The input a KV node's row begins with."""


_OF_PROMPTS: Final = frozenset({"echo", "pooling", "warm"})
"""Arguments of walks whose node is heard though no token of it is."""


class GraphOutputs:
    """What of a model's graph every order asks for, worked out once.

    Attributes:
        tracks: the track of each node that speaks.
        speakers: by walk, the nodes whose values go to the client.
    """

    def __init__(self, graph: ModelGraph) -> None:
        self.graph: Final = graph
        self.tracks: Final[Mapping[str, str]] = graph.tracks
        self.speakers: Final[Mapping[str, tuple[str, ...]]] = {
            name: tuple(node.name for node in walk.node_table if _speaks(node))
            for name, walk in graph.walks.items()
        }


class StepPlacement:
    """One order, placed.

    Attributes:
        rank: the rank the order is for.
        walks: its walks, compiled, in order.
        is_alone: the whole request is on this rank.
        others: the other ranks of the step.
        tracks: those that this rank writes in this step, by the node that speaks there; for a row that goes
            from rank to rank the last one speaks.
    """

    def __init__(self, script: GraphOutputs, ready: NodeReady) -> None:
        graph = script.graph
        if unknown := [call.name for call in ready.walks if call.name not in graph.walks]:
            raise BugError(f"{graph.family} has no walk {unknown[0]!r}; it has {sorted(graph.walks)}")
        self.rank = ready.rank
        self.walks: tuple[CompiledWalk, ...] = tuple(graph.walks[call.name] for call in ready.walks)
        self.is_alone = not ready.lives
        self._script = script
        self._graph = graph
        self._ready = ready
        self._streams: Mapping[InputPort, StreamInfo] = graph.streams
        self._speakers = self._found_speakers()
        self.others: tuple[int, ...] = () if self.is_alone else self._found_others()
        self.tracks: dict[str, str] = (
            {node: script.tracks[node] for node in self._speakers} if self.is_alone else self._found_tracks()
        )

    def rank_of(self, walk: str, node: str) -> int:
        """The rank that runs a node in a walk."""
        if self.is_alone:
            return self.rank
        try:
            return rank_of(self._ready.placement, self._ready.walk_placement, walk, node)
        except KeyError:
            raise BugError(
                f"walk {walk!r}: the order does not say on which rank node {node!r} runs; "
                f"it says it of {sorted(self._ready.placement)}"
            ) from None

    def here(self, walk: CompiledWalk) -> frozenset[str]:
        """The nodes of a walk that this rank runs."""
        return frozenset(node for node in walk.nodes if self.rank_of(walk.name, node) == self.rank)

    def _found_others(self) -> tuple[int, ...]:
        ranks = {self.rank_of(walk.name, node) for walk in self.walks for node in walk.nodes}
        return tuple(sorted(ranks - {self.rank}))

    # ---- what is put out ---------------------------------------------------------------------------
    def _found_tracks(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for walk in self.walks:
            for node in self._speakers & walk.nodes.keys():
                if self.rank_of(walk.name, node) == self.rank:
                    found[node] = self._script.tracks[node]
                elif self._graph.nodes[node] is EngineKind.KV:
                    found.pop(node, None)
        return found

    def track_of(self, node: str) -> str:
        """The track of a node that speaks."""
        return self._script.tracks[node]

    def speaks(self, node: str) -> bool:
        """Whether a client reads what a node says in this step.

        An echo is said by the node of its prompt, and so is an embedding; and of a prompt that is computed
        for others that nothing is.
        """
        return node in self._speakers

    def _found_speakers(self) -> set[str]:
        found: set[str] = set()
        for walk, call in zip(self.walks, self._ready.walks, strict=True):
            found.update(self._script.speakers[walk.name])
            if not _OF_PROMPTS.isdisjoint(call.args):
                found.update(node for node in walk.nodes if self._graph.nodes[node] is EngineKind.KV)
        return found

    def is_sole_speaker(self, node: str) -> bool:
        """Whether no other rank speaks for the node, in any walk of the model."""
        return self.is_alone or all(
            self.rank_of(walk, node) == self.rank
            for walk, speakers in self._script.speakers.items()
            if node in speakers
        )

    # ---- values ------------------------------------------------------------------------------------
    def is_read_elsewhere(self, place: int, route: Route) -> bool:
        """Whether another rank reads what goes on a route of a walk, in that walk or in a later one."""
        if isinstance(route.to, str):
            there = self.rank_of(self.walks[place].name, route.to)
            return there != self.rank or (route.edge == PROMPT and self.moves(route.to))
        return any(
            self.rank_of(walk.name, node) != self.rank
            for walk in self.walks[place + 1 :]
            for node in walk.takers.get(route.edge, ())
        )

    # ---- rows of KV nodes --------------------------------------------------------------------------
    def begins(self, node: str) -> int:
        """The place of the first walk over a node."""
        return next(place for place, walk in enumerate(self.walks) if node in walk.nodes)

    def goes_on_at(self, place: int, node: str) -> int | None:
        """The rank where a node's row goes on behind a walk; None where it ends with it."""
        behind = (walk for walk in self.walks[place + 1 :] if node in walk.nodes)
        following = next(behind, None)
        return None if following is None else self.rank_of(following.name, node)

    @property
    def has_rows(self) -> bool:
        """Whether this rank runs a KV node in this step."""
        return any(
            self._graph.nodes[node] is EngineKind.KV and self.rank_of(walk.name, node) == self.rank
            for walk in self.walks
            for node in walk.nodes
        )

    def moves(self, node: str) -> bool:
        """Whether a KV node's row goes from one rank to another in this step."""
        if self.is_alone or self._graph.nodes[node] is not EngineKind.KV:
            return False
        return len({self.rank_of(walk.name, node) for walk in self.walks if node in walk.nodes}) > 1

    # ---- streams -----------------------------------------------------------------------------------
    def taker(self, stream: InputPort) -> int:
        """The rank that takes a stream."""
        return self.rank_of(self._streams[stream].consumer_walk, stream[1])

    def feeders(self, stream: InputPort) -> frozenset[int]:
        """The ranks that may make a stream's items."""
        return frozenset(self.rank_of(walk, node) for walk, node in self._streams[stream].feeders)

    @property
    def ends(self) -> tuple[InputPort, ...]:
        """The streams of which this rank has to tell the end when the step's walks are done.

        It is the rank that fed it last in this step, or else the lowest of those in it.
        """
        if not self._ready.ends:
            return ()
        named = [pair for pair in self._streams if pair[0] in self._ready.ends]
        if missing := set(self._ready.ends) - {name for name, _ in named}:
            raise BugError(f"{self._graph.family} has no stream {min(missing)!r} to end")
        return tuple(pair for pair in named if self._speaker_of(pair) == self.rank)

    def _speaker_of(self, stream: InputPort) -> int:
        fed = [
            self.rank_of(walk.name, node.name)
            for walk in self.walks
            for node in walk.node_table
            if any((edge.name, edge.to) == stream for edge in node.streaming)
        ]
        return fed[-1] if fed else min((self.rank, *self.others))


def _speaks(node: CompiledNode) -> bool:
    return any(isinstance(route.to, Client) for route in node.routes)
