"""The stages of the pipeline of attention's decodes: measured on the GPU, when an engine is made.

With three stages, the loads of a turn of the kernel's loop wait for the end of the turn before, because both
use the same shared memory. With five they overlap, in twice the memory, so that fewer programs run at once.
Which is faster depends on the GPU and the size of heads.
"""

import logging
import math
from functools import partial
from types import SimpleNamespace
from typing import Any, Final

import torch
from triton.runtime.errors import OutOfResources

from workers.kv_engine.attention.pool import PagedPool
from workers.kv_engine.attention.triton import DEFAULT_STAGES, attend, decode_stages
from workers.kv_engine.gpu.cuda_graphs import CudaCapture, fastest_s

_LOGGER: Final = logging.getLogger(__name__)

MORE_STAGES: Final = 5
_SPANS: Final = 64
_KEYS: Final = 1024
_GROUP: Final = 4
"""Heads that share keys: up to 16 take the same tile, and only these use what is chosen."""
_REPEATS: Final = 10


@torch.inference_mode()
def choose_stages(pool: PagedPool, block_size: int) -> None:
    """Let `attend` use the faster number of stages for decodes over such a pool, measured once.

    It reads the memory of the first layer with attention, and writes nothing. On a CPU there is nothing to
    choose.
    """
    layers = zip(pool.keys, pool.values, pool.is_latent, strict=True)
    # Layers with recurrent states have no keys.
    found = next((layer for layer in layers if layer[0].shape[1] and not layer[2]), None)
    if found is None:
        return
    keys, values, _ = found
    shape = (keys.device, keys.dtype, keys.shape[-1])
    if keys.device.type != "cuda" or shape in decode_stages:
        return
    default_us = decode_us(keys, values, block_size, stages=DEFAULT_STAGES)
    try:
        more_us = decode_us(keys, values, block_size, stages=MORE_STAGES)
    except OutOfResources:  # of shared memory, for large heads on small GPUs
        more_us = math.inf
    decode_stages[shape] = DEFAULT_STAGES if default_us <= more_us else MORE_STAGES
    _LOGGER.info(
        "attention of decodes: %.0f us in %d stages, %.0f us in %d; the faster serve",
        default_us,
        DEFAULT_STAGES,
        more_us,
        MORE_STAGES,
    )


def decode_us(keys: torch.Tensor, values: torch.Tensor, block_size: int, *, stages: int) -> float:
    """Return the microseconds of a layer's attention of decodes, as it runs in a recorded step.

    Args:
        keys: (slots, K, D); as many spans are read as fit, up to 64 of 1,024 keys.
        values: (slots, K, D).
        block_size: tokens of a block.
        stages: as in `attend`.
    """
    device, blocks = keys.device, len(keys) // block_size
    columns = min(_KEYS // block_size, blocks)
    spans = min(_SPANS, blocks // columns)
    places = torch.arange(spans + 1, dtype=torch.int32, device=device)
    step: Any = SimpleNamespace(
        rows=places[:-1],
        query_offsets=places,
        kv_lengths=torch.full((spans,), columns * block_size, dtype=torch.int32, device=device),
        block_table=torch.arange(spans * columns, dtype=torch.int32, device=device).view(spans, columns),
        spans=SimpleNamespace(block_size=block_size),
    )
    heads, dim = _GROUP * keys.shape[1], keys.shape[2]
    queries = torch.zeros(spans, heads, dim, dtype=keys.dtype, device=device)
    work = partial(attend, queries, keys, values, step, stages=stages)

    def repeated() -> None:
        for _ in range(_REPEATS):
            work()

    replay = CudaCapture(device).capture(repeated) if device.type == "cuda" else repeated
    return 1e6 * fastest_s([replay], device)[0] / _REPEATS
