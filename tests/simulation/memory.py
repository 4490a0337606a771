"""Bounds of what simulated processes keep in memory, checked for every collection in their objects.

Each collection that is found is compared with a list of allowed bounds. A new collection that is never
emptied is therefore reported without being listed anywhere.
"""

from collections import deque
from collections.abc import Iterator, Sized
from typing import TYPE_CHECKING, Any, Final

from conductor.core.cluster import Cluster
from conductor.core.request import Request

if TYPE_CHECKING:
    from tests.simulation.workers import Worker

COLLECTIONS: Final = (dict, set, frozenset, list, tuple, deque)
_ENDED: Final = frozenset({"ended", "digests"})
"""Collections of ended requests: the core bounds them by number and by time."""
_JOINS: Final = frozenset({"_joins"})
"""Ids of incarnations: they grow with restarts, not with requests."""


def collections_in(thing: object, path: str = "") -> Iterator[tuple[str, Sized]]:
    """Yield every collection in one of our objects, at any depth, with its path."""
    for name in _fields_of(thing):
        value = getattr(thing, name, None)
        if isinstance(value, COLLECTIONS):
            yield f"{path}{name}", value
        elif type(value).__module__.split(".")[0] in {"conductor", "workers"}:
            yield from collections_in(value, f"{path}{name}.")


def _fields_of(thing: object) -> list[str]:
    slots = [name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())]
    return [*slots, *getattr(thing, "__dict__", {})]


def check_cluster(cluster: Cluster, where: str) -> None:
    """Check that a cluster keeps a bounded state for each open request, and none for others."""
    open_requests = len(cluster.open)
    for name, kept in collections_in(cluster):
        if name in _ENDED or name in _JOINS:
            continue
        most = _BOUNDS.get(name, open_requests)
        assert len(kept) <= most, (
            f"{where}: {name} has {len(kept)} entries, {open_requests} requests are open"
        )
    for request in cluster.ended.values():
        _check_ended(request, where)


_BOUNDS: Final[dict[str, int]] = {
    "world.ranks": 16,
    "refusals": 1_000,
    "blamed": 16,  # incarnations whose death an open request is suspected of
    "memory.affinity.prefixes": 16,  # by rank, and each of these by number
    "memory.admission_counts": 16,  # tenants, as of the last decision
    "memory.turns": 16,  # by group
}


def _check_ended(request: Request, where: str) -> None:
    """Check that nothing is kept of an ended request's input or results."""
    kept = [name for name in ("results", "tracks", "running") if getattr(request, name)]
    assert not kept, f"{where}: of {request.id}, which ended, {kept} are kept"


def check_worker(worker: "Worker") -> None:
    """Check that an idle worker keeps nothing but collections bounded by number."""
    inbox = worker.inbox
    for name, kept in [*collections_in(inbox, "inbox."), *_own(worker)]:
        if name in _KEPT_BY_WORKERS:
            continue
        assert not kept, f"{worker} has nothing to do, and keeps {name}: {kept!r:.200}"


def _own(worker: "Worker") -> list[tuple[str, Any]]:
    names = ("jobs", "attempts", "items")
    return [(name, getattr(worker, name)) for name in names]


_KEPT_BY_WORKERS: Final = frozenset(
    {
        "inbox._ended",  # ended requests: by number
        "inbox._peers.known",  # ids of incarnations: they grow with restarts
        "inbox._peers.current",
        "inbox._peers._latest",
    }
)
