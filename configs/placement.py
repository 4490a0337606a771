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
from typing import Annotated

import msgspec
from msgspec import Meta

from models.base import EngineKind, ModelGraph
from shared.closest_match import closest_match
from shared.ids import Rank


class PlacementError(ValueError):
    """A placement that cannot be; says group, key, value, and what would be right."""


class NodeGroup(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """These nodes run on these ranks, for all walks or for some.

    Attributes:
        node_names: nodes of the family; `decoder_lm` has `prepare` (template, tokenizer) and `llm`, `orpheus`
            has `prepare`, `LLM` and `snac_decoder`.
        ranks: they run on these; a rank is one GPU, or one CPU process. Of several, each request gets one.
        graph_walks: only in these walks; when absent, in all that no other group names for the node.
        tp_size: so many ranks share one copy of the node with a KV cache: the first so many, the next so
            many. Of each copy the first leads, and has the group's other nodes.
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
        ranks: replicas, in the order of the file; of copies that are shared, who leads them.
        followers: of each replica, who shares it with its leader; empty where nothing is shared.
        shared: the nodes of which followers have a part.
    """

    nodes: tuple[str, ...]
    walks: tuple[str, ...] | None
    ranks: tuple[Rank, ...]
    followers: tuple[tuple[Rank, ...], ...] = ()
    shared: tuple[str, ...] = ()


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
            placed.append(_placed(group, walks, graph))
    placed += _unnamed_cpu_nodes(graph, placed)
    _refuse_homeless(groups, graph, homes, {node for group in placed for node in group.nodes}, rest)
    _refuse_two_kv_nodes(graph, placed)
    _refuse_torn_copies(placed)
    return tuple(placed)


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
    """Every rank that gets orders, in order."""
    return sorted({rank for group in groups for rank in group.ranks})


def ranks_of(groups: Iterable[PlacedGroup]) -> list[Rank]:
    """Every rank, in order: those that get orders, and those that follow one."""
    following = {rank for group in groups for copy in group.followers for rank in copy}
    return sorted({*following, *leaders_of(groups)})


def nodes_on(groups: Iterable[PlacedGroup], rank: int) -> list[str]:
    """The nodes a rank hosts, or has a part of, each once, in the order of the groups."""
    found: list[str] = []
    for group in groups:
        if rank in group.ranks:
            found += group.nodes
        elif any(rank in copy for copy in group.followers):
            found += group.shared
    return list(dict.fromkeys(found))


def copy_of(groups: Iterable[PlacedGroup], rank: int) -> tuple[Rank, ...]:
    """All members of the copy that a rank shares, its leader first; only itself where it shares none."""
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
        if not any(graph.nodes[node] is EngineKind.KV for node in group.node_names):
            sharable = [node for node, kind in graph.nodes.items() if kind is EngineKind.KV]
            raise PlacementError(
                f"{where}: tp_size is {group.tp_size}, but none of {group.node_names} can be shared: only a "
                f"node with a KV cache is, of {graph.family} {sharable}; leave tp_size away"
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
    near = closest_match(word.lower(), lower)
    return f", did you mean {lower[near]!r}?" if near else ""


# ---- what is wrong between groups ----------------------------------------------------------------------


def _unnamed_cpu_nodes(graph: ModelGraph, placed: Sequence[PlacedGroup]) -> list[PlacedGroup]:
    named = {node for group in placed for node in group.nodes}
    unnamed = tuple(n for n, kind in graph.nodes.items() if kind is EngineKind.CPU and n not in named)
    if not unnamed or not placed:
        return []
    return [PlacedGroup(nodes=unnamed, walks=None, ranks=(leaders_of(placed)[0],))]


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


def _refuse_torn_copies(placed: Sequence[PlacedGroup]) -> None:
    """A follower follows one leader and does nothing else; a node that is shared has one group."""
    for group in placed:
        for follower in (rank for copy in group.followers for rank in copy):
            if any(follower in other.ranks for other in placed) or (
                sum(follower in copy for other in placed for copy in other.followers) > 1
            ):
                raise PlacementError(
                    f"rank {follower} follows another in a group with tp_size, and is in a second group: "
                    "expected a rank that does nothing else (the first rank of a copy may)"
                )
        for node in group.shared:
            if sum(node in other.nodes for other in placed) > 1:
                raise PlacementError(
                    f"node {node!r} has tp_size in one group and is in another: its keys and values cannot "
                    "be handed from one to the other; place it in one group, for all its walks"
                )
