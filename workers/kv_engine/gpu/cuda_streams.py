"""A GPU's streams: each engine's thread launches on one of its own, and steps go before batches.

    CUDA's default stream   every thread begins there, and weights are loaded there, whoever reads them
    StreamPriority.HIGH              steps of a KV engine, and of one that follows
    StreamPriority.LOW               batches of stateless nodes

What is launched on one stream is done in its order, and waits for no other. So is memory: what a thread lets
go of is taken again by what it launches later on its stream. Between threads go bytes in main memory, never
tensors on a GPU, so no thread ever waits for another's stream (docs/adr/0022-a-stream-for-each-engine.md).

Has not run on hardware yet: no GPU was at hand. What is tested is tested with streams that pretend.
"""

from enum import IntEnum

import torch


class StreamPriority(IntEnum):
    """Which of two streams a GPU takes up first, where both have something; in CUDA's measure."""

    FIRST = -1
    LAST = 0


def use_gpu_stream(device: torch.device, turn: StreamPriority) -> None:
    """From here on launch on a stream of the calling thread's own, behind what has been launched so far.

    For good: call it when the thread has loaded its weights, before it makes anything else on `device`, which
    becomes the current one. On a CPU there is nothing to do.
    """
    if device.type != "cuda":
        return
    own = torch.cuda.Stream(device, priority=turn)  # type: ignore[no-untyped-call]
    own.wait_stream(torch.cuda.current_stream(device))
    torch.cuda.set_stream(own)
