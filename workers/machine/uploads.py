"""Copies of numbers to a GPU that do not make the host wait.

A copy from ordinary memory waits for all work on the stream, so a step that makes one cannot be launched
while the step before is under way. A copy from pinned memory does not.
"""

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
