"""Detection of a lost CUDA context.

Some CUDA errors (an illegal address, a failed assertion, an uncorrectable memory error) end the context of
the process: every later call fails with them. An engine that fails one batch and continues would then fail
all requests that it is given. It ends instead; the process's successor computes them again.
"""

import torch

from shared.errors import WorkerError


class DeviceLostError(WorkerError):
    """The process cannot use its GPU any more; another process can."""

    code = "device_lost"


def check_context(device: torch.device) -> None:
    """Wait for the device, after an error in what it computed; on a CPU this does nothing.

    Raises:
        DeviceLostError: no work on it is possible in this process.
    """
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        why = str(error).partition("\n")[0]
        raise DeviceLostError(
            f"{device} cannot be used by this process any more ({why}): the process ends, and its successor "
            "computes the requests again"
        ) from error
