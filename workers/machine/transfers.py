"""Copies of numbers to and from a GPU that do not make the host wait.

A copy from or to ordinary memory waits for all work on the stream, so a step that makes one cannot be
launched while the step before is under way. A copy from or to pinned memory does not.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch


def upload(values: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """Return the values on the device; on a CPU, a tensor over the same memory.

    torch keeps the pinned memory until the copy is done.
    """
    tensor = torch.from_numpy(values)
    if device.type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def begin_download(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Start a copy of the tensor to the host, and return a function that waits for it and returns it."""
    if not tensor.is_cuda:
        return lambda: tensor
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arriving = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    arriving.copy_(tensor, non_blocking=True)
    copied.record(torch.cuda.current_stream(tensor.device))

    def wait() -> torch.Tensor:
        copied.synchronize()
        return arriving

    return wait
