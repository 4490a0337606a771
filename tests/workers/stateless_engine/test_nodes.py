"""Batches of firings with real tensors."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from models.base import ChunkOf, Item, StatelessResult
from models.encoder_cache import EncoderCache
from shared.errors import BugError, ClientError, DalSegnoError
from workers.data_plane.arrays import to_array
from workers.data_plane.port import Array
from workers.machine.gpu_context import DeviceLostError
from workers.stateless_engine.firing import FiringResult, StatelessFiring
from workers.stateless_engine.nodes import StatelessNodes
from workers.stateless_engine.results import NodeFailedError
from workers.stateless_engine.scheduler import BatchKey

CPU = torch.device("cpu")


class Choosy:
    """A node that batches items of one length, up to a cost, and has a cache."""

    max_batch = 8
    max_cost = 100

    def __init__(self) -> None:
        self.encoder_cache = EncoderCache()

    def group(self, item: Item) -> object:
        if item.args.get("fails"):
            raise KeyError("size")
        return tuple(item.inputs["x"].shape), item.inputs["x"].device.type

    def cost(self, item: Item) -> float:
        return item.inputs["x"].numel() * 2

    def run(self, items: Sequence[Item]) -> list[StatelessResult | Exception]:
        self.encoder_cache.fill(
            [item.args["digest"] for item in items], lambda new: [torch.zeros(2) for _ in new]
        )
        return [StatelessResult(outputs={}) for _ in items]


@dataclass
class Doubling:
    """A node that doubles `x` in place, and fails as its arguments request."""

    max_batch: int = 4
    batches: list[list[Item]] = field(default_factory=list)
    answers_short: bool = False

    def run(self, items: Sequence[Item]) -> list[StatelessResult | Exception]:
        self.batches.append(list(items))
        if any(item.args.get("raises") for item in items):
            raise IndexError("out of its depth")
        if self.answers_short:
            return []
        return [ClientError("not this one") if item.args.get("fails") else self._fire(item) for item in items]

    def _fire(self, item: Item) -> StatelessResult:
        return StatelessResult(
            outputs={"y": item.inputs["x"].mul_(2)}, facts={"seed": item.seed}, stops=("loop",)
        )


def firing(x: Sequence[float] = (1, 2), **changes: Any) -> StatelessFiring:
    array = to_array(torch.tensor(x, dtype=torch.float32))
    array.data.flags.writeable = False
    values: dict[str, Any] = {"inputs": {"x": array}, "args": {}, "seed": 0, "path": (), "chunk": None}
    return StatelessFiring(node="double", **(values | changes))


def run(node: Doubling, *firings: StatelessFiring) -> list[FiringResult | DalSegnoError]:
    return StatelessNodes({"double": node}, CPU).run("double", firings)


def floats(result: FiringResult | DalSegnoError) -> list[float]:
    assert isinstance(result, FiringResult)
    output = result.outputs["y"]
    assert isinstance(output, Array)
    found: list[float] = output.data.view(np.float32).tolist()
    return found


def test_firings_are_run_together_with_separate_results() -> None:
    node = Doubling()

    first, second = run(node, firing([1, 2], seed=7), firing([3]))

    assert [floats(first), floats(second)] == [[2, 4], [6]]
    assert isinstance(first, FiringResult)
    assert (first.facts, first.stops) == ({"seed": 7}, ("loop",))
    assert isinstance(first.outputs["y"], Array)
    assert first.outputs["y"] == Array(dtype="float32", shape=(2,), data=first.outputs["y"].data)
    assert len(node.batches) == 1


def test_an_item_says_what_the_firing_did() -> None:
    node, chunk = Doubling(), ChunkOf(number=1, fresh=2, last=False)

    run(node, firing(args={"a": 1}, seed=9, path=(4,), chunk=chunk))

    [[item]] = node.batches
    assert (item.args, item.seed, item.path, item.chunk) == ({"a": 1}, 9, (4,), chunk)


def test_a_node_that_writes_into_its_inputs_changes_no_other_memory() -> None:
    given = firing([1, 2])

    run(Doubling(), given)

    assert isinstance(given.inputs["x"], Array)
    assert given.inputs["x"].data.view(np.float32).tolist() == [1, 2]


def test_a_firing_that_the_node_fails_fails_alone() -> None:
    node = Doubling()

    good, bad = run(node, firing([1]), firing(args={"fails": True}))

    assert floats(good) == [2]
    assert isinstance(bad, ClientError)
    assert len(node.batches) == 1


def test_after_a_node_raises_each_firing_is_run_by_itself() -> None:
    node = Doubling()

    results = run(node, firing([1]), firing(args={"raises": True}), firing([3]))

    assert [floats(results[0]), floats(results[2])] == [[2], [6]]
    assert isinstance(results[1], NodeFailedError)
    assert results[1].message == "node 'double' failed: IndexError: out of its depth"
    assert [len(batch) for batch in node.batches] == [3, 1, 1, 1]


def test_a_batch_that_loses_the_gpu_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def check_context(device: torch.device) -> None:
        raise DeviceLostError(f"{device} is lost")

    monkeypatch.setattr("workers.stateless_engine.nodes.check_context", check_context)

    with pytest.raises(DeviceLostError, match="cpu is lost"):
        run(Doubling(), firing([1]), firing(args={"raises": True}))


def test_bytes_that_do_not_fit_fail_their_firing_alone() -> None:
    torn = Array(dtype="float32", shape=(3,), data=np.zeros(8, np.uint8))
    odd = Array(dtype="complex64", shape=(1,), data=np.zeros(8, np.uint8))

    results = run(Doubling(), firing(inputs={"x": torn}), firing([1]), firing(inputs={"x": odd}))

    assert floats(results[1]) == [2]
    assert "expected 12 bytes for float32[3], found 8" in str(results[0])
    assert "found 'complex64'" in str(results[2])


def test_too_few_results_of_a_node_are_a_bug() -> None:
    results = run(Doubling(answers_short=True), firing(), firing())

    assert [type(result) for result in results] == [BugError, BugError]


def test_no_gradients_are_recorded() -> None:
    class Multiply(torch.nn.Linear):
        max_batch = 1

        def run(self, items: Sequence[Item]) -> list[StatelessResult | Exception]:
            return [StatelessResult(outputs={"y": self(item.inputs["x"])}) for item in items]

    [result] = StatelessNodes({"double": Multiply(2, 3)}, CPU).run("double", [firing()])

    assert isinstance(result, FiringResult)
    assert result.outputs["y"].shape == (3,)


@pytest.mark.parametrize("most", [1, 16])
def test_the_largest_batch_of_each_node_is_known(most: int) -> None:
    assert StatelessNodes({"double": Doubling(max_batch=most)}, CPU).max_batch == {"double": most}


def test_a_node_groups_and_weighs_firings_by_shapes_and_arguments_without_their_data() -> None:
    nodes = StatelessNodes({"double": Choosy()}, CPU)

    assert nodes.max_cost == {"double": 100.0}
    assert nodes.batch_key(firing((1, 2, 3))) == BatchKey(((3,), "meta"), 6.0)
    with pytest.raises(NodeFailedError, match="KeyError"):
        nodes.batch_key(firing(args={"fails": True}))


def test_without_the_further_members_all_firings_are_alike() -> None:
    nodes = StatelessNodes({"double": Doubling()}, CPU)

    assert (nodes.max_cost, nodes.batch_key(firing()), nodes.encoder_caches()) == ({}, BatchKey(), [])


def test_the_counters_of_an_encoder_cache_are_reported() -> None:
    nodes = StatelessNodes({"double": Choosy()}, CPU)

    nodes.run("double", [firing(args={"digest": "a"}), firing(args={"digest": "b"})])
    nodes.run("double", [firing(args={"digest": "a"})])

    [counters] = nodes.encoder_caches()
    assert (counters.hits, counters.misses, counters.entries) == (1, 2, 2)
