"""The inputs of firings as tensors, and the results of nodes as bytes, or as the errors that they are."""

from collections.abc import Callable
from functools import partial

import torch

from models.base import Item, StatelessResult
from shared.errors import DalSegnoError, WorkerError
from shared.tensors import Handle
from workers.data_plane.arrays import publish, shape_only, to_array, to_tensor
from workers.data_plane.port import Array, DeviceArray, PublishOnDevice
from workers.stateless_engine.firing import FiringResult, StatelessFiring


class NodeFailedError(WorkerError):
    """A firing of a stateless node failed."""

    code = "node_failed"


def item_of(firing: StatelessFiring, device: torch.device) -> Item:
    """The input of a node, with tensors on its device.

    Raises:
        ValueError, RuntimeError, TensorGone: the bytes are invalid, or there is no memory for them.
    """
    return _item(firing, partial(to_tensor, device=device))


def shapes_of(firing: StatelessFiring) -> Item:
    """The input of a node, with tensors that have a shape and a type, and no numbers."""
    return _item(firing, shape_only)


def result_of(firing: StatelessFiring, result: StatelessResult | Exception) -> FiringResult | DalSegnoError:
    """The result of a firing, complete in main memory or published; or its error."""
    if isinstance(result, Exception):
        return failure_of(firing.node, result)
    try:
        outputs = {name: _output(tensor, firing.publish.get(name)) for name, tensor in result.outputs.items()}
        previews = {modality: to_array(tensor) for modality, tensor in result.previews.items()}
    except (RuntimeError, AttributeError, TypeError) as error:  # the device failed, or it is no tensor
        return failure_of(firing.node, error)
    return FiringResult(
        outputs=outputs,
        facts=result.facts,
        stops=result.stops,
        progress=result.progress,
        previews=previews,
    )


def failure_of(node: str, error: Exception) -> DalSegnoError:
    """The error as one that may fail a single firing."""
    if isinstance(error, DalSegnoError):
        return error
    return NodeFailedError(f"node {node!r} failed: {type(error).__name__}: {error}")


def _item(firing: StatelessFiring, read: Callable[[Array | DeviceArray], torch.Tensor]) -> Item:
    return Item(
        inputs={name: read(array) for name, array in firing.inputs.items()},
        args=firing.args,
        seed=firing.seed,
        path=firing.path,
        chunk=firing.chunk,
    )


def _output(tensor: torch.Tensor, publish_on_device: PublishOnDevice | None) -> Array | Handle:
    handle = publish(publish_on_device, tensor) if publish_on_device is not None else None
    return handle if handle is not None else to_array(tensor)
