"""Which rank of a group a request gets, where there are several. Pure.

The one where another group has put a node of it already: its keys and values then need not move. Else, by
the policy of the deployment:

    fsfs         the one with the fewest open requests
    rr           one after the other
    random       the one that the request's id says
    cache_aware  the one that had most of its beginning before; where none had any, one after the other

Of equals the one with the fewest open requests, then the lowest.
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
    """Where an open request is: the ranks it is placed on, of which it keeps others out of those of `closed`.

    `proven`: it may be there beside a suspect. `is_tried`: it is a suspect itself, on probation.
    """

    ranks: frozenset[int]
    closed: frozenset[int] = frozenset()
    proven: bool = False
    is_tried: bool = False
    tenant: str = ""


@dataclass(slots=True)
class Memory:
    """What choosing remembers from call to call. No decision is wrong without it: it is a cache.

    Attributes:
        turns: by group, how many were given a rank one after the other.
        served: of each tenant that is present, how many of its requests were let in (`conductor.core.queue`).
        affinity: what each rank had.
    """

    turns: Counter[tuple[int, ...]] = field(default_factory=Counter)
    served: Counter[str] = field(default_factory=Counter)
    affinity: Affinity = field(default_factory=Affinity)


@dataclass(slots=True)
class Ranks:
    """The ranks that are there, while places on them are given away.

    Attributes:
        most: so many requests does one have at most; None is without limit.
        load: how many open requests each has; `unproven`, those that are not proven.
        tried: on these a suspect is on probation.
        closed: nothing more begins on these: a suspect runs there alone, or one is waiting for that.
    """

    groups: tuple[PlacedGroup, ...]
    world: World
    policy: Policy
    most: int | None
    memory: Memory
    load: Counter[int] = field(default_factory=Counter)
    unproven: Counter[int] = field(default_factory=Counter)
    tried: set[int] = field(default_factory=set)
    closed: set[int] = field(default_factory=set)

    def take(self, place: Place) -> None:
        """Somebody has this place."""
        self.load.update(place.ranks)
        if not place.proven:
            self.unproven.update(place.ranks)
        if place.is_tried:
            self.tried |= place.ranks
        self.closed |= place.closed

    def open_in(self, group: PlacedGroup) -> list[int]:
        """The group's ranks where something may begin now."""
        there = (rank for rank in sorted(group.ranks) if self.world.incarnation(rank) is not None)
        return [rank for rank in there if rank not in self.closed]

    def roomy_in(self, group: PlacedGroup) -> list[int]:
        """Those of them that have not as many requests as they may have."""
        most = self.most
        return [rank for rank in self.open_in(group) if most is None or self.load[rank] < most]

    def choose(self, options: list[list[int]], request: Request) -> tuple[list[int], list[str]]:
        """A rank of each group, of those it may be, and why that one, where there was a choice."""
        alone = {n: group.ranks[0] for n, group in enumerate(self.groups) if len(group.ranks) == 1}
        chosen: dict[int, int] = dict(alone)
        why: list[str] = []
        names = pieces(request.submission.inputs) if self.policy == "cache_aware" else []
        for number, group in enumerate(self.groups):
            if number in chosen:
                continue
            near = [
                chosen[other]
                for other in sorted(chosen)
                if chosen[other] in options[number] and set(self.groups[other].nodes) & set(group.nodes)
            ]
            if near:
                rank, what = near[0], "it is there in other walks"
            else:
                rank, what = self._pick(options[number], group, request, names)
            nodes = " and ".join(group.nodes) + (f" in {' and '.join(group.walks)}" if group.walks else "")
            why.append(f"{nodes} on rank {rank} of {options[number]}: {what}")
            chosen[number] = rank
            self.memory.affinity.note(rank, names)
        return [chosen[number] for number in range(len(self.groups))], why

    def _pick(
        self, options: list[int], group: PlacedGroup, request: Request, names: list[bytes]
    ) -> tuple[int, str]:
        match self.policy:
            case "cache_aware":
                had = {rank: self.memory.affinity.has(rank, names) for rank in options}
                rank = min(options, key=lambda one: (-had[one], self.load[one], one))
                if had[rank]:
                    return rank, f"it had {had[rank]} of {len(names)} pieces of its beginning"
                return self._next(options, group), "none had its beginning; one after the other"
            case "rr":
                return self._next(options, group), "one after the other"
            case "random":
                digest = hashlib.blake2b(request.id.encode(), digest_size=8).digest()
                return options[int.from_bytes(digest) % len(options)], "as its id says"
            case "fsfs":
                rank = min(options, key=lambda one: (self.load[one], one))
                return rank, f"the least loaded, {self.load[rank]} requests open"

    def _next(self, options: list[int], group: PlacedGroup) -> int:
        """One after the other; who is away or full is passed over."""
        self.memory.turns[group.ranks] += 1
        return options[(self.memory.turns[group.ranks] - 1) % len(options)]
