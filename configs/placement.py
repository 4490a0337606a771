"""The placement of nodes on ranks: `node_groups` of a configuration, resolved against a model graph. Pure.

    node_groups:                                               prefill      decode      snac_chunk
      - {node_names: [LLM], ranks: [0, 1],                     LLM 0|1      LLM 2       snac_decoder 2
         graph_walks: [prefill]}
      - {node_names: [LLM, snac_decoder], ranks: [2]}

In every walk, each node belongs to exactly one group: the one that names both node and walk, otherwise the
one that names the node and no walks. Several ranks of a group are replicas; a request uses one of them. The
ranks of one request are recorded as two maps: a rank per node, and exceptions per walk (`assign`, `rank_of`).

`NodeGroup` is the unchecked input of `resolve`, `PlacedGroup` its checked result.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from models.base import TOKEN, EngineKind, ModelGraph
from shared.closest_match import closest_match
from shared.ids import Rank


class PlacementError(ValueError):
    """An invalid placement. The message names group, key, value and what was expected."""


class NodeGroup(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Nodes and the ranks that execute them, for all walks or for some.

    Attributes:
        node_names: nodes of the family, e.g. `prepare` (template, tokenizer) and `llm` of `decoder_lm`.
            [The nodes of the families](#nodes-of-the-families) are listed below.
        ranks: the ranks that execute these nodes: GPUs, or CPU processes. Several ranks are replicas: each
            request uses one of them.
        graph_walks: the walks to which the group applies; default: all walks that no other group names for
            the node.
        tp_size: ranks that share one node with a KV cache by tensor parallelism. Consecutive ranks form a TP
            group; its first rank leads and executes the group's other nodes.
    """

    node_names: Annotated[list[str], Meta(min_length=1)]
    ranks: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(min_length=1)]
    graph_walks: list[str] | None = None
    tp_size: Annotated[int, Meta(ge=1)] = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedGroup:
    """Nodes whose rank is chosen together.

    Attributes:
        nodes: in the order of the file.
        walks: the walks to which the group applies; None: all walks that no other group names for the node.
        ranks: the replicas, in the order of the file; of a TP group, its leader.
        followers: the followers of each replica; empty without tensor parallelism.
        shared: the nodes that followers execute a part of.
    """

    nodes: tuple[str, ...]
    walks: tuple[str, ...] | None
    ranks: tuple[Rank, ...]
    followers: tuple[tuple[Rank, ...], ...] = ()
    shared: tuple[str, ...] = ()


def resolve(groups: Sequence[NodeGroup], graph: ModelGraph) -> tuple[PlacedGroup, ...]:
    """Resolve groups so that each (walk, node) of `graph` belongs to exactly one.

    A CPU node that no group names runs on the lowest rank: published placements list GPU nodes only. Optional
    nodes that no group names are left out, and the walks that need them.

    Raises:
        PlacementError: a group is invalid, or a node belongs to no group or to two.
    """
    graph = graph.without(absent_nodes(groups, graph))
    groups = _without_former_nodes(groups, graph)
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
            placed.append(_placed(group, walks, graph))
    placed += _unnamed_cpu_nodes(graph, placed)
    _refuse_unplaced_nodes(groups, graph, homes, {node for group in placed for node in group.nodes}, rest)
    _refuse_two_shared_nodes(graph, placed)
    _refuse_moving_streams(graph, placed)
    _refuse_moving_programs(graph, placed)
    _refuse_split_tp_groups(placed)
    return tuple(placed)


def _without_former_nodes(groups: Sequence[NodeGroup], graph: ModelGraph) -> Sequence[NodeGroup]:
    """The groups without nodes that no longer exist; a group of nothing else is left out."""
    former = graph.former_nodes
    if not any(former & set(group.node_names) for group in groups):
        return groups
    kept = [[node for node in group.node_names if node not in former] for group in groups]
    return [
        msgspec.structs.replace(group, node_names=nodes)
        for group, nodes in zip(groups, kept, strict=True)
        if nodes
    ]


def absent_nodes(groups: Iterable[NodeGroup | PlacedGroup], graph: ModelGraph) -> frozenset[str]:
    """The optional nodes of a graph that no group names."""
    return graph.optional - {
        node
        for group in groups
        for node in (group.nodes if isinstance(group, PlacedGroup) else group.node_names)
    }


def _placed(group: NodeGroup, walks: tuple[str, ...] | None, graph: ModelGraph) -> PlacedGroup:
    nodes, ranks, size = tuple(group.node_names), tuple(map(Rank, group.ranks)), group.tp_size
    if size == 1:
        return PlacedGroup(nodes=nodes, walks=walks, ranks=ranks)
    copies = [ranks[begin : begin + size] for begin in range(0, len(ranks), size)]
    return PlacedGroup(
        nodes=nodes,
        walks=walks,
        ranks=tuple(copy[0] for copy in copies),
        followers=tuple(copy[1:] for copy in copies),
        shared=tuple(node for node in nodes if graph.nodes[node] is EngineKind.KV),
    )


def leaders_of(groups: Iterable[PlacedGroup]) -> list[Rank]:
    """The ranks that receive orders, sorted."""
    return sorted({rank for group in groups for rank in group.ranks})


def ranks_of(groups: Iterable[PlacedGroup]) -> list[Rank]:
    """All ranks, sorted: those that receive orders, and their followers."""
    following = {rank for group in groups for copy in group.followers for rank in copy}
    return sorted({*following, *leaders_of(groups)})


def nodes_on(groups: Iterable[PlacedGroup], rank: int) -> list[str]:
    """The nodes that a rank executes in whole or in part, each once, in the order of the groups."""
    found: list[str] = []
    for group in groups:
        if rank in group.ranks:
            found += group.nodes
        elif any(rank in copy for copy in group.followers):
            found += group.shared
    return list(dict.fromkeys(found))


def tp_group_of(groups: Iterable[PlacedGroup], rank: int) -> tuple[Rank, ...]:
    """The TP group of a rank, leader first; the rank alone if it shares no node."""
    copies = (
        (leader, *following)
        for group in groups
        for leader, following in zip(group.ranks, group.followers, strict=False)
    )
    return next((copy for copy in copies if rank in copy), (Rank(rank),))


def home_of(groups: Iterable[PlacedGroup], walk: str, node: str) -> PlacedGroup:
    """The group of `node` in `walk`."""
    having = [group for group in groups if node in group.nodes]
    named = [group for group in having if group.walks is not None and walk in group.walks]
    return (named or [group for group in having if group.walks is None])[0]


def assign(
    groups: Sequence[PlacedGroup], chosen: Sequence[int]
) -> tuple[dict[str, int], dict[str, dict[str, int]]]:
    """Build a request's `placement` and `walk_placement`. `chosen` has its rank of each group.

    The first has every node; the second has, by walk, only the nodes with another rank there.
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
    """The rank that executes `node` in `walk`, according to a request's two maps (`assign`)."""
    elsewhere = walk_placement.get(walk, {})
    return elsewhere[node] if node in elsewhere else placement[node]


# ---- checks of one group ----------------------------------------------------------------------


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
        if not any(graph.nodes[node] is EngineKind.KV for node in group.node_names):
            sharable = [node for node, kind in graph.nodes.items() if kind is EngineKind.KV]
            raise PlacementError(
                f"{where}: tp_size is {group.tp_size}, but none of {group.node_names} can be shared: only a "
                f"node with a KV cache is, of {graph.family} {sharable}; omit tp_size"
            )


def _walks_of(group: NodeGroup, graph: ModelGraph, where: str) -> tuple[str, ...] | None:
    """The walks of a group without those that no longer exist; None for all walks of its nodes."""
    if group.graph_walks is None:
        return None
    where = f"{where}: graph_walks"
    if not group.graph_walks:
        raise PlacementError(f"{where}: expected at least one walk, or no such key (all walks), found []")
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
                f"but {sorted(graph.walks[walk].nodes)}; remove it"
            )
    return walks


def _near(word: str, known: Iterable[str]) -> str:
    lower = {name.lower(): name for name in known}
    near = closest_match(word.lower(), lower)
    return f", did you mean {lower[near]!r}?" if near else ""


# ---- checks between groups ----------------------------------------------------------------------


def _unnamed_cpu_nodes(graph: ModelGraph, placed: Sequence[PlacedGroup]) -> list[PlacedGroup]:
    named = {node for group in placed for node in group.nodes}
    unnamed = tuple(n for n, kind in graph.nodes.items() if kind is EngineKind.CPU and n not in named)
    if not unnamed or not placed:
        return []
    return [PlacedGroup(nodes=unnamed, walks=None, ranks=(leaders_of(placed)[0],))]


def _refuse_unplaced_nodes(
    groups: Sequence[NodeGroup],
    graph: ModelGraph,
    homes: Mapping[tuple[str, str], int],
    named: set[str],
    rest: Mapping[str, int],
) -> None:
    if unplaced := sorted(set(graph.nodes) - named):
        raise PlacementError(f"no node_group places {unplaced}; add them to a group's node_names")
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
                f"of {' or '.join(mine)}, or omit graph_walks in one of its groups, which is for the rest"
            )


def _refuse_two_shared_nodes(graph: ModelGraph, placed: Sequence[PlacedGroup]) -> None:
    for group in placed:
        for ranks in ((leader, *copy) for leader, copy in zip(group.ranks, group.followers, strict=False)):
            found = {node for rank in ranks for node in nodes_on(placed, rank)}
            kv = sorted(node for node in found if graph.nodes[node] is EngineKind.KV)
            if len(kv) > 1:
                raise PlacementError(
                    f"the ranks {list(ranks)} share a node by tp_size, and would run {kv}: expected one node "
                    "with keys and values on them; place the others on ranks of their own (ranks may share "
                    "a device)"
                )


def _refuse_moving_streams(graph: ModelGraph, placed: Sequence[PlacedGroup]) -> None:
    """Refuse several groups for a KV node that sends or takes tensors: its sequences cannot change ranks."""
    for name, to in graph.streams:
        ends = {to} | {node for _, node in graph.streams[name, to].producers if name != TOKEN}
        for node in sorted(ends):
            groups = sum(node in group.nodes for group in placed)
            if graph.nodes[node] is EngineKind.KV and groups > 1:
                raise PlacementError(
                    f"node {node!r} is placed in {groups} groups, but the stream {name!r} of tensors goes "
                    "with its sequences, which cannot move from one rank to another: place it in one group, "
                    "for all its walks"
                )


def _refuse_moving_programs(graph: ModelGraph, placed: Sequence[PlacedGroup]) -> None:
    """Refuse several groups for a KV node with token programs: a canvas cannot be handed over."""
    for node, kind in sorted(graph.nodes.items()):
        groups = sum(node in group.nodes for group in placed)
        if graph.token_programs and kind is EngineKind.KV and groups > 1:
            raise PlacementError(
                f"node {node!r} is placed in {groups} groups, but {graph.family} generates several tokens at "
                "a time, so an answer stays on the rank that began it: place it in one group for all walks"
            )


def _refuse_split_tp_groups(placed: Sequence[PlacedGroup]) -> None:
    """Refuse followers with two leaders or other tasks."""
    for group in placed:
        for follower in (rank for copy in group.followers for rank in copy):
            if any(follower in other.ranks for other in placed) or (
                sum(follower in copy for other in placed for copy in other.followers) > 1
            ):
                raise PlacementError(
                    f"rank {follower} follows another in a group with tp_size, and is in a second group: "
                    "expected a rank that does nothing else (the first rank of a copy may)"
                )
