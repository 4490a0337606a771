"""Loading of nodes onto a device: the KV node or a member's part of it, its draft model, stateless nodes.

The model family loads the weights (`nodes.load`). Our own kernels then replace the layers they support.
"""

import logging
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import torch

from configs.deployment import ConfigError, DeploymentConfig
from models import registry
from models.base import EngineKind, Peers
from models.checkpoints.files import CONFIG, read_json_if_present
from workers.loading import device_share
from workers.loading.device_share import DeviceShare
from workers.loading.lean_transformers import import_transformers
from workers.machine.cpu_threads import kernel_threads
from workers.settings import EngineSettings

if TYPE_CHECKING:
    from workers.kv_engine.node import KVNode
    from workers.tensor_parallel.group import GroupMembership

_LOGGER: Final = logging.getLogger(__name__)

Progress = Callable[[int, int, str], None]
"""Receives the bytes read, the bytes in all, and the node; called from several threads."""


def load_node(
    config: DeploymentConfig,
    node: str,
    settings: EngineSettings,
    device: torch.device,
    progress: Progress,
    *,
    peers: Peers | None = None,
    leaves_weights: bool = False,
) -> Any:
    """Load one node of the graph by its family's loader; with `peers`, a member's part of a shared node.

    With `leaves_weights`, those that kernels may read themselves can be left in the files: `with_kernels` has
    to follow.

    Raises:
        CheckpointError: the checkpoint cannot be served.
        ConfigError: the family's nodes cannot be shared.
    """
    load = registry.module(config.model, "nodes").load
    leaves_weights &= "leaves_weights" in signature(load).parameters
    if peers is not None:
        _check_shares(config, load, node, peers.size)
    return load(
        Path(config.checkpoint),
        node,
        device=device,
        dtype=settings.dtype,
        progress=lambda done, total, name: progress(done, total, node),
        kwargs=config.model_kwargs,
        **({"peers": peers} if peers is not None else {}),
        **({"leaves_weights": True} if leaves_weights else {}),
    )


def load_kv_node(
    config: DeploymentConfig,
    name: str,
    settings: EngineSettings,
    device: torch.device,
    progress: Progress,
    group: "GroupMembership | None",
    *,
    leaves_weights: bool = False,
) -> "KVNode":
    """Load the KV node, or this rank's part of it in its tensor-parallel group; see `load_node`.

    Raises:
        GroupLostError: a member of the group is gone.
        CheckpointError: the checkpoint cannot be served.
        ConfigError: `max_seq_len` exceeds the model's, or the family's nodes cannot be shared.
    """
    peers: Peers | None = None
    if group is not None:
        from workers.kv_engine.parallel.collectives import (  # noqa: PLC0415 - half a second, for a group only
            TorchPeers,
        )

        peers = TorchPeers(group.rendezvous, device)
    node: KVNode = load_node(
        config, name, settings, device, progress, peers=peers, leaves_weights=leaves_weights
    )
    _check_length(config, node.max_positions)
    return node


def load_draft_model(
    config: DeploymentConfig,
    served: "KVNode",
    settings: EngineSettings,
    share: DeviceShare,
    progress: Progress,
) -> "KVNode | None":
    """Load the model that drafts tokens for `served`; None where the settings name none.

    Raises:
        CheckpointError: its checkpoint cannot be served.
        ConfigError: its vocabulary is another one.
    """
    if settings.draft_model is None:
        return None
    smaller = msgspec.structs.replace(config, checkpoint=settings.draft_model)
    leaves = can_leave_weights(smaller, settings, share.device)
    loaded = load_node(smaller, served.name, settings, share.device, progress, leaves_weights=leaves)
    draft = with_kernels(loaded, settings, share, quantised_from=smaller)
    if draft.vocab_size != served.vocab_size:
        raise ConfigError(
            f"model_kwargs.draft_model: {settings.draft_model} has {draft.vocab_size} tokens, the served "
            f"model {served.vocab_size}: expected one with the same tokenizer"
        )
    return draft


def with_kernels(
    node: "KVNode",
    settings: EngineSettings,
    share: DeviceShare,
    *,
    quantised_from: DeploymentConfig | None = None,
) -> "KVNode":
    """Replace layers by our own kernels, as far as the settings and the kernels allow.

    With `quantised_from`, the configuration of the node's checkpoint, its weights are quantised if the
    settings say so.

    Raises:
        ConfigError, UnsupportedArchitectureError: they shall be quantised, and no kernel multiplies them.
    """
    if settings.kernels == "torch":
        _LOGGER.info("%s is computed by torch, as model_kwargs.kernels says", node.name)
        from workers.kv_engine.node import fill  # noqa: PLC0415 - imports transformers

        fill(node)
        return node
    check_device(settings, share.device)
    from workers.loading.quantised_loading import quantisation_of  # noqa: PLC0415 - imports transformers

    quantisation = quantisation_of(quantised_from, settings)
    if share.device.type == "cuda":
        from workers.kv_engine.gpu.fusion import use_gpu_kernels  # noqa: PLC0415 - needs CUDA

        return use_gpu_kernels(node, quantisation)
    from workers.cpu_kernels.decoder import use_cpu_kernels  # noqa: PLC0415 - imports transformers

    return use_cpu_kernels(
        node, threads=kernel_threads(node.parameters, share.cores), quantisation=quantisation
    )


def check_device(settings: EngineSettings, device: torch.device) -> None:
    """Raise an error if our kernels of a device cannot compute what is wanted, whatever the model.

    Raises:
        ConfigError: the message names the key and what is expected.
    """
    if device.type == "cuda" and settings.kv_cache != "auto":
        raise ConfigError(
            f"model_kwargs.kv_cache is {settings.kv_cache}, but the model is on a GPU, which keeps keys and "
            "values as floats: leave it out"
        )
    if device.type != "cuda" and settings.quantize == "fp8":
        raise ConfigError(
            "model_kwargs.quantize is fp8, which our kernels for GPUs multiply, but the model is on a CPU: "
            "expected int8 or int4"
        )


def can_leave_weights(config: DeploymentConfig, settings: EngineSettings, device: torch.device) -> bool:
    """Return whether weights can be left in the files for our kernels.

    On a GPU only those of few bits, or that are to have few: others are loaded as they are computed with.

    Raises:
        CheckpointError: the checkpoint's configuration is damaged.
    """
    if device.type != "cuda":
        return True
    if settings.kernels == "torch":
        return False
    is_stored = read_json_if_present(Path(config.checkpoint) / CONFIG).get("quantization_config") is not None
    return settings.quantises or (is_stored and settings.quantize == "auto")


def check_kv_nodes(config: DeploymentConfig) -> bool:
    """Raise what loading the KV nodes would raise before the first weight is read.

    A family of another package may have no such check (`nodes.examine`). Then only sharing is checked.

    Returns:
        True where the family has checked its nodes.

    Raises:
        CheckpointError: the checkpoint cannot be served, or not by that many ranks together.
        ConfigError: the configuration does not fit the model.
    """
    shared = {
        (node, len(config.tp_group_of(rank)))
        for rank in config.ranks
        for node in device_share.nodes_of(config, rank, EngineKind.KV)
    }
    if not shared:
        return False
    import_transformers()
    nodes = registry.module(config.model, "nodes")
    examine = getattr(nodes, "examine", None)
    for node, members in sorted(shared):
        if members > 1:
            _check_shares(config, nodes.load, node, members)
        if examine is not None:
            _check_length(config, examine(Path(config.checkpoint), node, members=members))
    return examine is not None


def _check_length(config: DeploymentConfig, max_positions: int) -> None:
    if config.max_seq_len > max_positions:
        raise ConfigError(
            f"max_seq_len is {config.max_seq_len}, but the model in {config.checkpoint} was made for "
            f"{max_positions} tokens; set max_seq_len to at most that"
        )


def _check_shares(config: DeploymentConfig, load: Callable[..., Any], node: str, members: int) -> None:
    if "peers" not in signature(load).parameters:
        raise ConfigError(
            f"node_groups: {config.model} does not know how to share {node!r} among {members} ranks; "
            "leave tp_size out"
        )
