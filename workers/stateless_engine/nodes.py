"""Stateless nodes on their device: a batch of firings becomes tensors, and the results become bytes.

A firing fails alone. A node returns an error for it, or raises; then each firing of the batch is run once
more by itself, which is possible because the node has no state.

On a GPU the nodes compute on the calling thread's stream (`workers.kv_engine.gpu.cuda_streams`). Results are
in main memory, and complete, when `run` returns.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Final, cast

import torch

from models.base import Item, StatelessNode, StatelessResult
from models.encoder_cache import CacheCounters, EncoderCache
from models.stepped import SteppedNode, is_stepped
from shared.errors import BugError, DalSegnoError, TensorGone
from workers.machine.cores import cores
from workers.machine.cpu_threads import give_way, stateless_threads, use_cpu_threads
from workers.machine.gpu_context import check_context
from workers.stateless_engine.firing import FiringResult, StatelessFiring
from workers.stateless_engine.results import failure_of, item_of, result_of, shapes_of
from workers.stateless_engine.scheduler import BatchKey
from workers.stateless_engine.stepper import TorchStepper

_LOGGER: Final = logging.getLogger(__name__)


class StatelessNodes:
    """The stateless nodes of one rank, on `device`; to be made and called in one thread.

    Args:
        with_kv_node: a KV node on the same device in this process has precedence.
        cpu_cores: on a CPU, how many of the machine's cores the rank uses; None is all of them.
    """

    def __init__(
        self,
        nodes: Mapping[str, StatelessNode | SteppedNode],
        device: torch.device,
        *,
        with_kv_node: bool = False,
        cpu_cores: int | None = None,
    ) -> None:
        if device.type == "cpu":
            use_cpu_threads(stateless_threads(cpu_cores or cores(), with_kv_node=with_kv_node))
            if with_kv_node:
                give_way()
        self.device: Final = device
        self.steppers: Final = {
            name: TorchStepper(name, node, device) for name, node in nodes.items() if is_stepped(node)
        }
        self._nodes = {
            name: cast(StatelessNode, node) for name, node in nodes.items() if not is_stepped(node)
        }
        self.max_batch: Final = {name: node.max_batch for name, node in self._nodes.items()}
        costs = {name: getattr(node, "max_cost", None) for name, node in self._nodes.items()}
        self.max_cost: Final = {name: float(most) for name, most in costs.items() if most is not None}
        self._caches = [getattr(node, "encoder_cache", None) for node in nodes.values()]

    def batch_key(self, firing: StatelessFiring) -> BatchKey:
        """The group and the cost of a firing, as its node tells them by the shapes and the arguments.

        Raises:
            NodeFailedError: it raised something else.
        """
        node = self._nodes[firing.node]
        group, cost = getattr(node, "group", None), getattr(node, "cost", None)
        if group is None and cost is None:
            return BatchKey()
        try:
            item = shapes_of(firing)
            found = group(item) if group is not None else None
            hash(found)
            return BatchKey(found, float(cost(item)) if cost is not None else 0.0)
        except Exception as error:
            raise failure_of(firing.node, error) from error

    def encoder_caches(self) -> list[CacheCounters]:
        """The counters of the nodes that have an encoder cache."""
        return [cache.counters for cache in self._caches if isinstance(cache, EncoderCache)]

    @torch.inference_mode()
    def run(self, node: str, firings: Sequence[StatelessFiring]) -> list[FiringResult | DalSegnoError]:
        """Return the result or the error of each firing.

        Raises:
            DeviceLostError: the GPU cannot be used by this process any more.
        """
        items = [self._read(firing) for firing in firings]
        results = iter(self._run(node, [item for item in items if isinstance(item, Item)]))
        return [
            result_of(firing, next(results)) if isinstance(item, Item) else failure_of(node, item)
            for firing, item in zip(firings, items, strict=True)
        ]

    def _read(self, firing: StatelessFiring) -> Item | Exception:
        try:
            return item_of(firing, self.device)
        except (ValueError, RuntimeError, TensorGone) as error:  # invalid bytes, or no memory for the tensor
            check_context(self.device)
            return error

    def _run(self, node: str, items: Sequence[Item]) -> list[StatelessResult | Exception]:
        if not items:
            return []
        try:
            results: list[StatelessResult | Exception] | None = self._nodes[node].run(items)
        except Exception as error:  # noqa: BLE001 - an error of a model fails this batch only
            check_context(self.device)
            _LOGGER.warning(
                "node %s: %s: %s, in a batch of %d", node, type(error).__name__, str(error), len(items)
            )
            if len(items) == 1:
                return [error]
            results = None
        if results is None:  # after the block above, which holds the memory of the batch that failed
            return [result for item in items for result in self._run(node, [item])]
        if len(results) != len(items):
            return [
                BugError(f"node {node!r} returned {len(results)} results for {len(items)} firings")
            ] * len(items)
        return results
