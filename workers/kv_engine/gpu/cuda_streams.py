"""CUDA streams: each engine thread launches on its own stream, and KV steps have priority over batches.

    CUDA's default stream    every thread starts on it, and all weights are loaded on it
    StreamPriority.HIGH      steps of a KV engine, and of a follower
    StreamPriority.LOW       batches of stateless nodes

Work on one stream runs in order and does not wait for other streams. Memory follows the same rule: what a
thread frees is reused by what it launches later on its stream. Threads exchange bytes in main memory and
never tensors on a GPU, so no thread waits for another's stream (docs/adr/0022-a-stream-for-each-engine.md).

The tests use simulated streams.
"""

from enum import IntEnum

import torch


class StreamPriority(IntEnum):
    """The priority of a CUDA stream: the GPU starts work of the lower number first."""

    HIGH = -1
    LOW = 0


def use_gpu_stream(device: torch.device, turn: StreamPriority) -> None:
    """Let the calling thread launch on a new stream, after all work that it has launched so far.

    The change is permanent. Call it after the thread has loaded its weights and before it makes anything else
    on `device`, which becomes the current device. On a CPU this does nothing.
    """
    if device.type != "cuda":
        return
    own = torch.cuda.Stream(device, priority=turn)  # type: ignore[no-untyped-call]
    own.wait_stream(torch.cuda.current_stream(device))
    torch.cuda.set_stream(own)
