"""Stateless nodes on their device: a batch of firings becomes tensors, and the results become bytes.

A firing fails alone. A node returns an error for it, or raises; then each firing of the batch is run once
more by itself, which is possible because the node has no state.

On a GPU the nodes compute on the calling thread's stream (`workers.kv_engine.gpu.cuda_streams`). Results are
in main memory, and complete, when `run` returns.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

import torch

from models.base import Item, StatelessNode, StatelessResult
from models.encoder_cache import CacheCounters, EncoderCache
from shared.errors import BugError, DalSegnoError, TensorGone, WorkerError
from shared.tensors import Handle
from workers.data_plane.arrays import publish, shape_only, to_array, to_tensor
from workers.data_plane.port import Array, DeviceArray, PublishOnDevice
from workers.machine.cores import cores
from workers.machine.cpu_threads import give_way, stateless_threads, use_cpu_threads
from workers.stateless_engine.firing import FiringResult, StatelessFiring
from workers.stateless_engine.scheduler import BatchKey

_LOGGER: Final = logging.getLogger(__name__)


class NodeFailedError(WorkerError):
    """A firing of a stateless node failed."""

    code = "node_failed"


class StatelessNodes:
    """The stateless nodes of one rank, on `device`; to be made and called in one thread.

    Args:
        with_kv_node: a KV node on the same device in this process has precedence.
        cpu_cores: on a CPU, how many of the machine's cores the rank uses; None is all of them.
    """

    def __init__(
        self,
        nodes: Mapping[str, StatelessNode],
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
        self.max_batch: Final = {name: node.max_batch for name, node in nodes.items()}
        costs = {name: getattr(node, "max_cost", None) for name, node in nodes.items()}
        self.max_cost: Final = {name: float(most) for name, most in costs.items() if most is not None}
        self._nodes = dict(nodes)

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
            item = self._item(firing, shape_only)
            found = group(item) if group is not None else None
            hash(found)
            return BatchKey(found, float(cost(item)) if cost is not None else 0.0)
        except Exception as error:
            raise _failure(firing.node, error) from error

    def encoder_caches(self) -> list[CacheCounters]:
        """The counters of the nodes that have an encoder cache."""
        caches = (getattr(node, "encoder_cache", None) for node in self._nodes.values())
        return [cache.counters for cache in caches if isinstance(cache, EncoderCache)]

    @torch.inference_mode()
    def run(self, node: str, firings: Sequence[StatelessFiring]) -> list[FiringResult | DalSegnoError]:
        """Return the result or the error of each firing."""
        items = [self._read(firing) for firing in firings]
        results = iter(self._run(node, [item for item in items if isinstance(item, Item)]))
        return [
            _fired(firing, next(results)) if isinstance(item, Item) else _failure(node, item)
            for firing, item in zip(firings, items, strict=True)
        ]

    def _read(self, firing: StatelessFiring) -> Item | Exception:
        try:
            return self._item(firing, partial(to_tensor, device=self.device))
        except (ValueError, RuntimeError, TensorGone) as error:  # invalid bytes, or no memory for the tensor
            return error

    @staticmethod
    def _item(firing: StatelessFiring, read: Callable[[Array | DeviceArray], torch.Tensor]) -> Item:
        return Item(
            inputs={name: read(array) for name, array in firing.inputs.items()},
            args=firing.args,
            seed=firing.seed,
            path=firing.path,
            chunk=firing.chunk,
        )

    def _run(self, node: str, items: Sequence[Item]) -> list[StatelessResult | Exception]:
        if not items:
            return []
        try:
            results = self._nodes[node].run(items)
        except Exception as error:  # noqa: BLE001 - an error of a model fails this batch only
            _LOGGER.warning(
                "node %s: %s: %s, in a batch of %d", node, type(error).__name__, error, len(items)
            )
            if len(items) == 1:
                return [error]
            return [result for item in items for result in self._run(node, [item])]
        if len(results) != len(items):
            return [
                BugError(f"node {node!r} returned {len(results)} results for {len(items)} firings")
            ] * len(items)
        return results


def _fired(firing: StatelessFiring, result: StatelessResult | Exception) -> FiringResult | DalSegnoError:
    node = firing.node
    if isinstance(result, Exception):
        return _failure(node, result)
    try:
        outputs = {name: _output(tensor, firing.publish.get(name)) for name, tensor in result.outputs.items()}
        previews = {modality: to_array(tensor) for modality, tensor in result.previews.items()}
    except (
        RuntimeError,
        AttributeError,
        TypeError,
    ) as error:  # the device failed, or the output is not a tensor
        return _failure(node, error)
    return FiringResult(
        outputs=outputs,
        facts=result.facts,
        stops=result.stops,
        progress=result.progress,
        previews=previews,
    )


def _output(tensor: torch.Tensor, publish_on_device: PublishOnDevice | None) -> Array | Handle:
    handle = publish(publish_on_device, tensor) if publish_on_device is not None else None
    return handle if handle is not None else to_array(tensor)


def _failure(node: str, error: Exception) -> DalSegnoError:
    if isinstance(error, DalSegnoError):
        return error
    return NodeFailedError(f"node {node!r} failed: {type(error).__name__}: {error}")
