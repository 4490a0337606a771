"""The choice of a rank of each node group for a request, if the group has several. Pure.

A rank that another group has already given a node of the request is preferred, because keys and values then
need not move. Otherwise the deployment's policy decides:

    fsfs         the rank with the fewest open requests
    rr           round robin
    random       derived from the request id
    cache_aware  the rank with the longest known prefix of the prompt; round robin if no rank knows any

Ties are resolved by the fewest open requests, then by the lowest rank.
"""

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import msgspec

from conductor.core.affinity import Affinity, pieces
from conductor.core.request import Request, World
from configs.placement import PlacedGroup

Policy: TypeAlias = Literal["fsfs", "rr", "random", "cache_aware"]


class Place(msgspec.Struct, frozen=True):
    """The placement of an open request: its ranks, and in `closed` those that accept no other request.

    `proven`: it may share a rank with a suspect. `is_quarantined`: it is itself a suspect in quarantine.
    """

    ranks: frozenset[int]
    closed: frozenset[int] = frozenset()
    proven: bool = False
    is_quarantined: bool = False
    tenant: str = ""


@dataclass(slots=True)
class Memory:
    """State that the choice keeps between calls. It is a cache; no decision is wrong without it.

    Attributes:
        turns: by group, the number of round-robin choices.
        admission_counts: by present tenant, its number of admissions (`conductor.core.queue`).
        affinity: the known prefixes of each rank.
    """

    turns: Counter[tuple[int, ...]] = field(default_factory=Counter)
    admission_counts: Counter[str] = field(default_factory=Counter)
    affinity: Affinity = field(default_factory=Affinity)


@dataclass(slots=True)
class Ranks:
    """The available ranks while places on them are assigned.

    Attributes:
        most: maximum of requests per rank; None is no limit.
        load: open requests by rank; `unproven` counts those that are not proven harmless.
        quarantine_ranks: ranks with a suspect in quarantine.
        closed: ranks that accept no requests, because a suspect runs there or waits until the rank is empty.
    """

    groups: tuple[PlacedGroup, ...]
    world: World
    policy: Policy
    most: int | None
    memory: Memory
    load: Counter[int] = field(default_factory=Counter)
    unproven: Counter[int] = field(default_factory=Counter)
    quarantine_ranks: set[int] = field(default_factory=set)
    closed: set[int] = field(default_factory=set)

    def occupy(self, place: Place) -> None:
        """Occupy a place."""
        self.load.update(place.ranks)
        if not place.proven:
            self.unproven.update(place.ranks)
        if place.is_quarantined:
            self.quarantine_ranks |= place.ranks
        self.closed |= place.closed

    def open_in(self, group: PlacedGroup) -> list[int]:
        """The group's ranks that accept requests now."""
        present = (rank for rank in sorted(group.ranks) if self.world.incarnation(rank) is not None)
        return [rank for rank in present if rank not in self.closed]

    def available_in(self, group: PlacedGroup) -> list[int]:
        """The group's ranks that accept requests and are below the limit."""
        most = self.most
        return [rank for rank in self.open_in(group) if most is None or self.load[rank] < most]

    def choose(self, options: list[list[int]], request: Request) -> tuple[list[int], list[str]]:
        """Choose a rank of each group from its options; return also the reason, if there was a choice."""
        fixed = {n: group.ranks[0] for n, group in enumerate(self.groups) if len(group.ranks) == 1}
        chosen: dict[int, int] = dict(fixed)
        reasons: list[str] = []
        names = pieces(request.submission.inputs) if self.policy == "cache_aware" else []
        for number, group in enumerate(self.groups):
            if number in chosen:
                continue
            shared = [
                chosen[other]
                for other in sorted(chosen)
                if chosen[other] in options[number] and set(self.groups[other].nodes) & set(group.nodes)
            ]
            if shared:
                rank, reason = shared[0], "the nodes run there in other walks"
            else:
                rank, reason = self._pick(options[number], group, request, names)
            nodes = " and ".join(group.nodes) + (f" in {' and '.join(group.walks)}" if group.walks else "")
            reasons.append(f"{nodes} on rank {rank} of {options[number]}: {reason}")
            chosen[number] = rank
            self.memory.affinity.note(rank, names)
        return [chosen[number] for number in range(len(self.groups))], reasons

    def _pick(
        self, options: list[int], group: PlacedGroup, request: Request, names: list[bytes]
    ) -> tuple[int, str]:
        match self.policy:
            case "cache_aware":
                cached = {rank: self.memory.affinity.has(rank, names) for rank in options}
                rank = min(options, key=lambda one: (-cached[one], self.load[one], one))
                if cached[rank]:
                    return rank, f"its cache has {cached[rank]} of {len(names)} pieces of the prompt"
                return self._next(options, group), "no rank has its prompt prefix cached, round robin"
            case "rr":
                return self._next(options, group), "round robin"
            case "random":
                digest = hashlib.blake2b(request.id.encode(), digest_size=8).digest()
                return options[int.from_bytes(digest) % len(options)], "derived from the request id"
            case "fsfs":
                rank = min(options, key=lambda one: (self.load[one], one))
                return rank, f"least loaded, {self.load[rank]} open requests"

    def _next(self, options: list[int], group: PlacedGroup) -> int:
        """Round robin; absent and full ranks are skipped."""
        self.memory.turns[group.ranks] += 1
        return options[(self.memory.turns[group.ranks] - 1) % len(options)]
