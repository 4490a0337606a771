"""Coverage of a gate: the event types, outcomes, codes and layouts it compared, and those it lacked. Pure.

A gate that passes says nothing about what its sample did not contain.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import product
from typing import Final

import msgspec

from conductor.core.cluster import Cluster
from conductor.core.schedule import Deployment
from configs.placement import assign
from dalsegno.gate.selection import Contents, Seen, layout_of

EVENT_TYPES: Final = "event types"
OUTCOMES: Final = ("finished", "failed", "rejected", "cancelled")
CODES: Final = (
    "deadline_exceeded",
    "internal_error",
    "malformed_request",
    "payload_too_large",
    "poison_request",
    "queue_full",
    "request_expired",
    "request_id_conflict",
    "worker_lost",
)
"""The codes of failures and refusals that the conductor writes itself; others are those of a model family."""
_SCHEDULED: Final = ("model_not_found",)
_MOST_LAYOUTS: Final = 64


class Covered(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of thing: how many requests have each, and the known ones that none has."""

    name: str
    seen: dict[str, int]
    unseen: list[str]


def event_types() -> list[str]:
    """All event types that a log may have, without their versions."""
    return sorted({str(kind.__struct_config__.tag).rpartition(".")[0] for kind in Cluster.HANDLERS})


def covered(
    chosen: Sequence[Seen], sources: Iterable[Contents], deployments: Iterable[Deployment]
) -> list[Covered]:
    """The coverage of the chosen requests of some sources, which `deployments` served as far as is known."""
    types = Counter(kind for one in chosen for kind in one.types)
    types.update({kind for source in sources for kind in source.types})
    codes = Counter(one.summary.code for one in chosen if one.summary is not None and one.summary.code)
    layouts = Counter(one.layout for one in chosen if one.layout)
    return [
        _covered(EVENT_TYPES, types, event_types()),
        _covered("outcomes", Counter(one.outcome for one in chosen), OUTCOMES),
        _covered("codes", codes, (*CODES, *_SCHEDULED)),
        _covered("layouts", layouts, known_layouts(deployments)),
    ]


def known_layouts(deployments: Iterable[Deployment]) -> list[str]:
    """The layouts that deployments can choose; none of those that can choose from very many."""
    found: dict[str, None] = {}
    for one in deployments:
        count = 1
        for group in one.groups:
            count *= len(group.ranks)
        if count <= _MOST_LAYOUTS:
            for ranks in product(*(group.ranks for group in one.groups)):
                found[layout_of(*assign(one.groups, ranks))] = None
    return list(found)


def _covered(name: str, seen: Counter[str], known: Iterable[str]) -> Covered:
    return Covered(
        name=name,
        seen=dict(sorted(seen.items(), key=lambda one: (-one[1], one[0]))),
        unseen=[one for one in known if one not in seen],
    )


def line_of(one: Covered) -> str:
    """A line of the report; the caller sanitises it."""
    total = len(one.seen) + len(one.unseen)
    seen = ", ".join(f"{name} ({count:,})" for name, count in one.seen.items()) or "none"
    unseen = f"; not {', '.join(one.unseen)}" if one.unseen else ""
    return f"coverage: {one.name}, {len(one.seen)} of {total}: {seen}{unseen}"
