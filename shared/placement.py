"""Where a model's nodes run: the file's `node_groups`, read against the family's graph. Pure.

    node_groups:                                               prefill      decode      snac_chunk
      - {node_names: [LLM], ranks: [0, 1],                     LLM 0|1      LLM 2       snac_decoder 2
         graph_walks: [prefill]}
      - {node_names: [LLM, snac_decoder], ranks: [2]}

Every node has, in every walk that runs it, exactly one group: the one that names both, else the one that
names the node and no walks. A request gets one rank of each group: several ranks are replicas. What a
request got is two maps, of nodes and of the walks in which a node is elsewhere (`assign`, `rank_of`).

A group of `node_groups` says what was meant, and may be wrong: `resolve` finds it out. A `PlacedGroup` is
right.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Annotated

import msgspec
from msgspec import Meta

from shared.ids import Rank
from shared.models.base import EngineKind, ModelGraph


class PlacementError(ValueError):
    """A placement that cannot be; says group, key, value, and what would be right."""


class NodeGroup(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """These nodes run on these ranks, for all walks or for some.

    Attributes:
        node_names: nodes of the family; `decoder_lm` has `prepare` (template, tokenizer) and `llm`, `orpheus`
            has `prepare`, `LLM` and `snac_decoder`.
        ranks: they run on these; a rank is one GPU, or one CPU process. Of several, each request gets one.
        graph_walks: only in these walks; when absent, in all that no other group names for the node.
        tp_size: ranks that share one copy of the nodes; 1 is all that is there yet.
    """

    node_names: Annotated[list[str], Meta(min_length=1)]
    ranks: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(min_length=1)]
    graph_walks: list[str] | None = None
    tp_size: Annotated[int, Meta(ge=1)] = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedGroup:
    """Nodes that are chosen a rank for together.

    Attributes:
        nodes: in the order of the file.
        walks: in these; None: in all in which no other group has the node.
        ranks: replicas, in the order of the file.
    """

    nodes: tuple[str, ...]
    walks: tuple[str, ...] | None
    ranks: tuple[Rank, ...]


def resolve(groups: Sequence[NodeGroup], graph: ModelGraph) -> tuple[PlacedGroup, ...]:
    """The groups in which each (walk, node) of `graph` has exactly one home.

    A CPU node that no group names runs on the lowest rank: published placements know only what runs on GPUs.

    Raises:
        PlacementError: a group cannot be, or a node has no home, or two.
    """
    homes: dict[tuple[str, str], int] = {}  # (walk, node) -> the group that names both
    rest: dict[str, int] = {}  # node -> the group that names no walks
    placed: list[PlacedGroup] = []
    for number, group in enumerate(groups):
        _check(group, graph, f"node_groups[{number}]")
        walks = _walks_of(group, graph, f"node_groups[{number}]")
        for node in group.node_names:
            if walks is None:
                if node in rest:
                    raise PlacementError(
                        f"node_groups[{number}]: node {node!r} is placed already by node_groups[{rest[node]}]"
                    )
                rest[node] = number
            for walk in walks or ():
                if (walk, node) in homes:
                    raise PlacementError(
                        f"node_groups[{number}]: node {node!r} is placed already in walk {walk!r} "
                        f"by node_groups[{homes[walk, node]}]"
                    )
                if node in graph.walks[walk].nodes:
                    homes[walk, node] = number
        if walks != ():
            ranks = tuple(map(Rank, group.ranks))
            placed.append(PlacedGroup(nodes=tuple(group.node_names), walks=walks, ranks=ranks))
    placed += _unnamed_cpu_nodes(graph, placed)
    _refuse_homeless(groups, graph, homes, {node for group in placed for node in group.nodes}, rest)
    _refuse_two_kv_nodes(graph, placed)
    return tuple(placed)


def ranks_of(groups: Iterable[PlacedGroup]) -> list[Rank]:
    """Every rank, in order."""
    return sorted({rank for group in groups for rank in group.ranks})


def nodes_on(groups: Iterable[PlacedGroup], rank: int) -> list[str]:
    """The nodes a rank hosts, each once, in the order of the groups."""
    return list(dict.fromkeys(node for group in groups if rank in group.ranks for node in group.nodes))


def home_of(groups: Iterable[PlacedGroup], walk: str, node: str) -> PlacedGroup:
    """The group of `node` in `walk`."""
    having = [group for group in groups if node in group.nodes]
    named = [group for group in having if group.walks is not None and walk in group.walks]
    return (named or [group for group in having if group.walks is None])[0]


def assign(
    groups: Sequence[PlacedGroup], chosen: Sequence[int]
) -> tuple[dict[str, int], dict[str, dict[str, int]]]:
    """A request's `placement` and `walk_placement`, where `chosen` is its rank of each group.

    The first has every node; the second only the walks, and in them the nodes, that are elsewhere.
    """
    mine = list(zip(groups, chosen, strict=True))
    placement: dict[str, int] = {}
    for group, rank in sorted(mine, key=lambda one: one[0].walks is not None):  # those for all walks first
        for node in group.nodes:
            placement.setdefault(node, rank)
    walk_placement: dict[str, dict[str, int]] = {}
    for group, rank in mine:
        for walk in group.walks or ():
            for node in group.nodes:
                if placement[node] != rank:
                    walk_placement.setdefault(walk, {})[node] = rank
    return placement, walk_placement


def rank_of(
    placement: Mapping[str, int], walk_placement: Mapping[str, Mapping[str, int]], walk: str, node: str
) -> int:
    """The rank that runs `node` in `walk` for a request with these maps (`assign`)."""
    elsewhere = walk_placement.get(walk, {})
    return elsewhere[node] if node in elsewhere else placement[node]


# ---- what is wrong with one group ----------------------------------------------------------------------


def _check(group: NodeGroup, graph: ModelGraph, where: str) -> None:
    for node in group.node_names:
        if node not in graph.nodes:
            near = _near(node, graph.nodes)
            raise PlacementError(
                f"{where}: unknown node {node!r}{near}; {graph.family} has {sorted(graph.nodes)}"
            )
    for key, names in ("node_names", group.node_names), ("ranks", group.ranks):
        if len(set(names)) < len(names):
            raise PlacementError(f"{where}: {key}: expected each once, found {names}")
    if group.tp_size > 1:
        if len(group.ranks) % group.tp_size:
            raise PlacementError(
                f"{where}: {len(group.ranks)} ranks do not divide by tp_size {group.tp_size}; "
                "expected tp_size ranks for each copy of the nodes"
            )
        raise PlacementError(
            f"{where}: tp_size is {group.tp_size}, but tensor parallelism is not there yet: a node runs "
            f"whole on one rank; leave tp_size away and name one of the ranks {group.ranks} "
            "(several are replicas)"
        )


def _walks_of(group: NodeGroup, graph: ModelGraph, where: str) -> tuple[str, ...] | None:
    """The walks a group is for, none that is no more; None for all there are for its nodes."""
    if group.graph_walks is None:
        return None
    where = f"{where}: graph_walks"
    if not group.graph_walks:
        raise PlacementError(f"{where}: expected at least one walk, or no such key for all, found []")
    walks = tuple(walk for walk in dict.fromkeys(group.graph_walks) if walk not in graph.former_walks)
    for walk in walks:
        if walk not in graph.walks:
            raise PlacementError(
                f"{where}: unknown walk {walk!r}{_near(walk, graph.walks)}; "
                f"{graph.family} has {sorted(graph.walks)}"
            )
        if not set(group.node_names) & set(graph.walks[walk].nodes):
            raise PlacementError(
                f"{where}: walk {walk!r} runs none of {group.node_names}, "
                f"but {sorted(graph.walks[walk].nodes)}; take it out"
            )
    return walks


def _near(word: str, known: Iterable[str]) -> str:
    lower = {name.lower(): name for name in known}
    near = get_close_matches(word.lower(), lower, n=1)
    return f", did you mean {lower[near[0]]!r}?" if near else ""


# ---- what is wrong between groups ----------------------------------------------------------------------


def _unnamed_cpu_nodes(graph: ModelGraph, placed: Sequence[PlacedGroup]) -> list[PlacedGroup]:
    named = {node for group in placed for node in group.nodes}
    unnamed = tuple(n for n, kind in graph.nodes.items() if kind is EngineKind.CPU and n not in named)
    if not unnamed or not placed:
        return []
    return [PlacedGroup(nodes=unnamed, walks=None, ranks=(ranks_of(placed)[0],))]


def _refuse_homeless(
    groups: Sequence[NodeGroup],
    graph: ModelGraph,
    homes: Mapping[tuple[str, str], int],
    named: set[str],
    rest: Mapping[str, int],
) -> None:
    if homeless := sorted(set(graph.nodes) - named):
        raise PlacementError(f"no node_group places {homeless}; add them to a group's node_names")
    for node in sorted(named):
        missing = [
            name for name, walk in graph.walks.items() if node in walk.nodes and (name, node) not in homes
        ]
        mine = [f"node_groups[{number}]" for number, group in enumerate(groups) if node in group.node_names]
        if node in rest and not missing:
            raise PlacementError(
                f"node_groups[{rest[node]}]: node {node!r} has nothing to do there: "
                "other groups name all its walks; take it out of this one, or a walk out of theirs"
            )
        if node not in rest and missing and mine:
            raise PlacementError(
                f"no node_group places node {node!r} in the walks {missing}; add them to the graph_walks "
                f"of {' or '.join(mine)}, or leave graph_walks away in one of its groups: it is for the rest"
            )


def _refuse_two_kv_nodes(graph: ModelGraph, placed: Sequence[PlacedGroup]) -> None:
    for rank in ranks_of(placed):
        kv = [node for node in nodes_on(placed, rank) if graph.nodes[node] is EngineKind.KV]
        if len(kv) > 1:
            raise PlacementError(
                f"rank {rank} would run {kv}, each with keys and values of its own; "
                "expected one such node per rank: place the others on ranks of their own "
                "(two ranks may share a device)"
            )
