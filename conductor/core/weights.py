"""The weights that a request is computed with, and the consequences of a change (ADR 27). Pure.

Workers join with a digest of what each node has loaded. `schedule` records the digests of a placement in
`request.admitted` and `request.resumed`, by node; `<walk>/<node>` is a node that runs elsewhere in that walk.

- A node with different weights on several ranks: the request fails, for the ranks would exchange keys and
  values of two models.
- A resumption on other weights, after output was reported: the request fails.
- The same, before any: the request starts from the beginning. A rank that finds released output of an attempt
  before that start fails its step (`NodeReady.weights_since`).

A digest that is not known, as in older logs, equals every other one.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final

from conductor.core.request import World
from configs.placement import PlacedGroup
from shared.errors import WeightsChangedError
from shared.events import Failure

_SHOWN_CHARS: Final = 12


def of_placement(
    placement: Mapping[str, int], walk_placement: Mapping[str, Mapping[str, int]], world: World
) -> dict[str, str]:
    """The known digests of a placement, as they are recorded."""
    placed = dict(placement) | {
        f"{walk}/{node}": rank for walk, nodes in walk_placement.items() for node, rank in nodes.items()
    }
    digests = {key: _digest(world, rank, key.rpartition("/")[2]) for key, rank in sorted(placed.items())}
    return {key: digest for key, digest in digests.items() if digest}


def revisions_of(
    placement: Mapping[str, int], walk_placement: Mapping[str, Mapping[str, int]], world: World
) -> list[str]:
    """The checkpoints on a hub that the ranks of a placement have loaded, each once."""
    placed = {*placement.values(), *(rank for nodes in walk_placement.values() for rank in nodes.values())}
    return sorted({state.revision for rank in placed if (state := world.ranks.get(rank))} - {""})


def conflict(weights: Mapping[str, str]) -> Failure | None:
    """The failure of a placement on which a node has different weights; None if it has none."""
    for node, digests in _by_node(weights).items():
        if len(digests) > 1:
            found = " and ".join(digest[:_SHOWN_CHARS] for digest in sorted(digests))
            return _failure(
                f"the ranks of node {node!r} have loaded different weights ({found}), and cannot exchange "
                "keys and values; put the same checkpoint on the machines of all its ranks"
            )
    return None


def changed(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """The nodes whose weights are known and differ, in words; empty if all are the same."""
    known, found = _by_node(before), _by_node(now)
    return [
        f"{node} had {min(known[node])[:_SHOWN_CHARS]}, has {min(found[node])[:_SHOWN_CHARS]}"
        for node in sorted(known.keys() & found.keys())
        if known[node] != found[node]
    ]


def change_failure(changes: Sequence[str]) -> Failure:
    """The failure of a request whose output was released by other weights."""
    return _failure(
        f"the answer was begun with other weights than those loaded now ({'; '.join(changes)}): a worker has "
        "restarted with a changed checkpoint, and no answer is written by two models; send the request again"
    )


# ---- the choice of ranks -------------------------------------------------------------------------


def same_weights(ranks: list[int], group: PlacedGroup, weights: Mapping[str, str], world: World) -> list[int]:
    """The ranks that have the weights of a request; all of them if none has."""
    known = _by_node(weights)
    same = [
        rank
        for rank in ranks
        if all(
            not (digest := _digest(world, rank, node)) or digest in known.get(node, {digest})
            for node in group.nodes
        )
    ]
    return same or ranks


def consistent(options: Sequence[list[int]], groups: Sequence[PlacedGroup], world: World) -> list[list[int]]:
    """The options of each group, without ranks whose weights the node's other groups do not have.

    A node that no digest is common to keeps its options: the placement then has a `conflict`.
    """
    found = [list(ranks) for ranks in options]
    nodes = [node for group in groups for node in group.nodes]
    for node in sorted({node for node in nodes if nodes.count(node) > 1}):
        hosts = [number for number, group in enumerate(groups) if node in group.nodes]
        common = set.intersection(*({_digest(world, rank, node) for rank in found[n]} for n in hosts))
        if not common or "" in common:
            continue
        counts = {
            digest: sum(_digest(world, r, node) == digest for n in hosts for r in found[n])
            for digest in common
        }
        best = max(sorted(common), key=lambda digest: counts[digest])
        for number in hosts:
            found[number] = [rank for rank in found[number] if _digest(world, rank, node) == best]
    return found


def _digest(world: World, rank: int, node: str) -> str:
    """The digest of a node on a rank; empty if unknown."""
    state = world.ranks.get(rank)
    return state.weights.get(node, "") if state else ""


def _by_node(weights: Mapping[str, str]) -> dict[str, set[str]]:
    """The digests of each node, in all walks."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for key, digest in weights.items():
        found[key.rpartition("/")[2]].add(digest)
    return dict(found)


def _failure(message: str) -> Failure:
    return Failure(code=WeightsChangedError.code, message=message, status=WeightsChangedError.status)
