"""What a rank hosts, loaded: the model on its device, and the engine with its pool.

Imported in the engine's thread, for torch comes with it and takes seconds; the event loop stays awake.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch

from shared.config import ConfigError, DeploymentConfig
from shared.models import registry
from workers import memory
from workers.engine.kv_engine import KVEngine
from workers.engine.node import Node
from workers.pool_size import pool_size
from workers.settings import EngineSettings

_LOGGER: Final = logging.getLogger(__name__)


def make_engine(
    config: DeploymentConfig,
    settings: EngineSettings,
    rank: int,
    progress: Callable[[int, int, str], None],
) -> KVEngine:
    """Load the model of `config` and make its engine.

    Raises:
        CheckpointError: the checkpoint cannot be served.
        ConfigError: the configuration asks for what is not there.
    """
    device = choose_device(settings.device, rank)
    rows, step_tokens = settings.rows_on(device.type), settings.step_tokens_on(device.type)
    node: Node = registry.face(config.model, "nodes").load(
        Path(config.checkpoint), device=device, dtype=settings.dtype, progress=progress
    )
    if config.max_seq_len > node.max_positions:
        raise ConfigError(
            f"max_seq_len is {config.max_seq_len}, but the model in {config.checkpoint} was made for "
            f"{node.max_positions} tokens; set max_seq_len to at most that"
        )
    layout = node.layout
    on_gpu = device.type == "cuda"
    size = pool_size(
        configured_tokens=config.kv_tokens,
        free_bytes=torch.cuda.mem_get_info(device)[0] if on_gpu else memory.available_bytes(),
        bytes_per_token=2 * layout.layers * layout.kv_heads * layout.head_dim * node.dtype.itemsize,
        block_size=settings.block_size,
        max_rows=rows,
        max_seq_len=config.max_seq_len,
        on_gpu=on_gpu,
    )
    _LOGGER.info("%s in %s on %s; KV pool: %s", config.name, node.dtype, device, size.reason)
    if size.tokens < config.max_seq_len:
        _LOGGER.warning(
            "the KV pool holds %d tokens, fewer than max_seq_len %d: longer requests are refused",
            size.tokens,
            config.max_seq_len,
        )
    return KVEngine(
        node,
        num_blocks=size.blocks,
        block_size=settings.block_size,
        max_step_tokens=step_tokens,
        max_rows=rows,
    )


def choose_device(name: str, rank: int) -> torch.device:
    """The device behind a setting; `auto` gives each rank its own GPU, as far as there are any.

    Raises:
        ConfigError: a GPU that is not there.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return torch.device("cuda", rank % count) if count else torch.device("cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ConfigError(f"model_kwargs.device is {name!r}, but this machine has {count} GPUs")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device
