"""A loop over two ranks, one of which dies: the next attempt begins at the newest checkpoint."""

from threading import Event

import numpy as np
import pytest

from models import registry
from shared.checkpoints import is_checkpoint
from shared.events import OutputChunk, WalkCall
from shared.subjects import worker_writer
from tests.workers import mesh
from tests.workers.cluster import Cluster, until
from tests.workers.harness import SUBJECTS, fence
from tests.workers.mesh import SIZE, floats, handle
from tests.workers.test_walks_over_ranks import fetch, meshed, nodes
from workers.data_plane.port import Array

ROUNDS = 10


class Turns(Event):
    """Lets so many calls pass, and holds the next ones until it is set."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.left = count

    def wait(self, timeout: float | None = None) -> bool:
        self.left -= 1
        return self.left >= 0 or super().wait(timeout)


@pytest.fixture(autouse=True)
def family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "graph", lambda family: mesh.GRAPH)


def polish(until: float = 2.0 ** (ROUNDS - 1)) -> WalkCall:
    """The state doubles in every round; the walk ends by its value, whatever it begins with."""
    inputs = {"state": handle("s", np.ones(SIZE)), "by": handle("b", np.ones(SIZE))}
    return WalkCall(name="polish", inputs=inputs, args={"rounds": 99, "until": until, "loop": "polish"})


def fed(cluster: Cluster, rank: int, node: str) -> list[float]:
    """The states that a node was given, as powers of two."""
    states = [firing.inputs["state"] for firing in nodes(cluster, rank).fired.get(node, [])]
    return [float(np.log2(floats(one)[0])) for one in states if isinstance(one, Array)]


async def stored(cluster: Cluster, count: int) -> None:
    """Wait for so many checkpoints."""
    await until(lambda: sum(is_checkpoint(chunk) for chunk in cluster.chunks("r")) == count)


async def test_all_ranks_begin_at_the_newest_checkpoint() -> None:
    async with meshed() as cluster:
        gate = nodes(cluster, 0).gates["mix"] = Turns(7)
        cluster.order("r", polish())
        await stored(cluster, 3)
        await cluster.members[1].die()
        await cluster.join(1)
        before = len(fed(cluster, 0, "pull"))
        nodes(cluster, 0).gates.clear()
        gate.set()
        cluster.put(SUBJECTS.output("g-1", "r", "conductor"), fence("r", 2))
        cluster.order("r", polish(), attempt=2)
        done = await cluster.done("r", 2, attempt=2)

        later = [6.0, 7.0, 8.0, 9.0]
        assert fed(cluster, 0, "pull")[before:] == fed(cluster, 1, "push") == later
        found = await fetch(cluster, done[0].results[0].outputs["state"], 1)
        assert np.array_equal(found, np.full(SIZE, 2.0**ROUNDS, np.float32))
        assert not any(chunk.index >= 0 for chunk in cluster.chunks("r")), "checkpoints are no output"

        cluster.put(SUBJECTS.output("g-1", "r", "conductor"), fence("r", 3))
        cluster.order("r", polish(), attempt=3)
        await cluster.done("r", 2, attempt=3)
        assert fed(cluster, 1, "push") == [*later, 8.0, 9.0], "the second attempt has stored one, too"


async def test_the_loop_of_another_walk_is_another_one() -> None:
    async with meshed() as cluster:
        cluster.order("r", polish())
        await stored(cluster, 4)
        await cluster.done("r", 2)
        nodes(cluster, 1).fired.clear()
        cluster.put(SUBJECTS.output("g-1", "r", "conductor"), fence("r", 2))
        cluster.order("r", polish(until=3.0), attempt=2)
        await cluster.done("r", 2, attempt=2)

        assert fed(cluster, 1, "push") == [0.0, 1.0]


async def test_what_is_stored_behind_the_fence_counts_for_no_rank() -> None:
    async with meshed() as cluster:
        cluster.order("r", polish())
        await stored(cluster, 4)
        await cluster.done("r", 2)
        late = next(chunk for chunk in cluster.chunks("r") if is_checkpoint(chunk))
        for rank in (0, 1):
            nodes(cluster, rank).fired.clear()
        cluster.put(SUBJECTS.output("g-1", "r", "conductor"), fence("r", 2))
        for attempt in (1, 2):  # a late one, and one of the new attempt that the slower rank would read
            other = OutputChunk(
                id=f"late.{attempt}",
                request_id="r",
                attempt=attempt,
                incarnation=cluster.members[0].life,
                index=-1,
                advisory=True,
                modality=late.modality,
                metadata=late.metadata,
                data=late.data,
            )
            cluster.put(SUBJECTS.output("g-1", "r", worker_writer(0)), other)
        cluster.order("r", polish(), attempt=2)
        await cluster.done("r", 2, attempt=2)

        assert fed(cluster, 0, "pull") == fed(cluster, 1, "push") == [8.0, 9.0]
