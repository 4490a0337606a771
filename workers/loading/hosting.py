"""What a rank hosts, loaded: nodes on their device, and the engines that run them.

Imported in the engines' threads, for torch comes with it and takes seconds; the event loop stays awake.
transformers comes with the KV engine only: a rank that has none starts without it.

Which ranks are on which device is read from the configuration, as if they were all on this machine: so
that two of them on one device leave each other room, in its memory and on its cores.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import torch

from configs.deployment import ConfigError, DeploymentConfig
from models import registry
from models.base import EngineKind, Peers
from workers.kv_engine.attention.kernels import AttentionKernel, choose_attention
from workers.kv_engine.gpu.cuda_streams import StreamPriority, use_gpu_stream
from workers.kv_engine.speculative.proposer import PromptLookup, Proposer
from workers.loading.lean_transformers import import_transformers
from workers.machine import memory
from workers.machine.cpu_threads import cores, kernel_threads, stateless_threads
from workers.machine.devices import choose_device
from workers.machine.kv_pool_size import PoolSize, pool_size
from workers.settings import EngineSettings
from workers.stateless_engine.nodes import StatelessNodes

if TYPE_CHECKING:
    from workers.kv_engine.engine import KVEngine
    from workers.kv_engine.gpu.cuda_graphs import GraphCapture
    from workers.kv_engine.kv_transfer import Allocate
    from workers.kv_engine.node import Node
    from workers.kv_engine.parallel.follower import FollowerEngine
    from workers.tensor_parallel.group import GroupMembership

_LOGGER: Final = logging.getLogger(__name__)

Progress = Callable[[int, int, str], None]
"""Told bytes read, bytes in all, and the node they are of; from several threads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """Where a rank computes, and who is there with it.

    Attributes:
        neighbours: other ranks on the device that compute something.
        pools: how many ranks on it, this one included, have a KV pool.
    """

    device: torch.device
    neighbours: tuple[int, ...]
    pools: int

    @property
    def cores(self) -> int:
        """How many of the machine's cores are for this rank."""
        return max(1, cores() // (len(self.neighbours) + 1))

    def __str__(self) -> str:
        if not self.neighbours:
            return str(self.device)
        others = ", ".join(map(str, self.neighbours))
        who = f"rank {others} computes" if len(self.neighbours) == 1 else f"ranks {others} compute"
        return f"{self.device}, which {who} on too"


def seat(config: DeploymentConfig, rank: int) -> Seat:
    """Where `rank` computes.

    Raises:
        ConfigError: on a GPU that is not there.
    """
    device = choose_device(config, rank)
    kinds = {other: kinds_of(config, other) - {EngineKind.CPU} for other in config.ranks}
    there = [
        other
        for other in config.ranks
        if kinds[other] and (other == rank or choose_device(config, other) == device)
    ]
    return Seat(
        device=device,
        neighbours=tuple(other for other in there if other != rank),
        pools=sum(EngineKind.KV in kinds[other] for other in there),
    )


def kinds_of(config: DeploymentConfig, rank: int) -> set[EngineKind]:
    """The engines a rank needs."""
    nodes = registry.graph(config.model).nodes
    return {nodes[node] for node in config.nodes_of(rank)}


def nodes_of(config: DeploymentConfig, rank: int, kind: EngineKind) -> list[str]:
    """The nodes of a kind that a rank hosts."""
    nodes = registry.graph(config.model).nodes
    return [node for node in config.nodes_of(rank) if nodes[node] is kind]


def make_kv_engine(
    config: DeploymentConfig,
    settings: EngineSettings,
    rank: int,
    progress: Progress,
    *,
    export_to: "Allocate | None" = None,
    copy: "GroupMembership | None" = None,
) -> "KVEngine":
    """Load the KV node of `rank` and make its engine; `export_to` is where keys and values are handed on.

    Called in the engine's thread, which has a GPU's stream of its own from then on.
    Where the node is shared, `copy` is with whom: this rank leads then.

    Raises:
        GroupLostError: one of them is gone.
        CheckpointError: the checkpoint cannot be served.
        ConfigError: the configuration asks for what is not there.
    """
    import_transformers()
    from workers.kv_engine.engine import KVEngine  # noqa: PLC0415 - brings transformers
    from workers.kv_engine.parallel.lockstep import Followers  # noqa: PLC0415 - the same

    at = seat(config, rank)
    device = at.device
    rows, step_tokens = settings.rows_on(device.type), settings.step_tokens_on(device.type)
    [name] = nodes_of(config, rank, EngineKind.KV)
    with memory.given_back():
        node = _kv_node(config, name, settings, device, progress, copy)
        kernel = choose_attention(node, settings.attention)
        if copy is None:  # the members of a copy meet within each layer
            node = _by_kernels(node, settings, at)
        draft = _draft(config, node, settings, at, progress)
    use_gpu_stream(device, StreamPriority.HIGH)
    blocks = _pool_of(config, settings, node, draft, at).blocks
    followers = Followers(copy.lines) if copy is not None else None
    if followers is not None:
        blocks = followers.agree(blocks, node.dtype)
    has_stateless = bool(nodes_of(config, rank, EngineKind.STATELESS))
    return KVEngine(
        node,
        num_blocks=blocks,
        block_size=settings.block_size,
        max_step_tokens=step_tokens,
        max_sequences=rows,
        export_to=export_to,
        prefix_cache=settings.prefix_cache,
        decode_slowdown_limit=settings.stretch,
        proposer=_proposer(draft, node, settings, blocks, rows, step_tokens),
        guesses=settings.speculate,
        cpu_cores=max(1, at.cores - stateless_threads(at.cores, with_kv_node=True))
        if has_stateless
        else at.cores,
        followers=followers,
        capture=_capture(settings, device, kernel),
        kernel=kernel,
    )


def _capture(
    settings: EngineSettings, device: torch.device, kernel: AttentionKernel | None
) -> "GraphCapture | None":
    """Who records steps of decodes: on a GPU, where a kernel attends; torch asks the host meanwhile."""
    if device.type != "cuda" or kernel is None or not settings.cuda_graphs:
        return None
    from workers.kv_engine.gpu.cuda_graphs import CudaCapture  # noqa: PLC0415 - where there is CUDA

    return CudaCapture(device)


def make_follower_engine(
    config: DeploymentConfig, settings: EngineSettings, rank: int, progress: Progress, copy: "GroupMembership"
) -> "FollowerEngine":
    """Load this rank's part of the KV node it shares, and make the engine that follows the copy's leader.

    Called in the engine's thread, as `make_kv_engine` is.

    Raises:
        GroupLostError: a member is gone.
        CheckpointError: the checkpoint cannot be served.
        ConfigError: the configuration asks for what is not there.
    """
    import_transformers()
    from workers.kv_engine.parallel.follower import FollowerEngine  # noqa: PLC0415 - brings transformers
    from workers.kv_engine.parallel.lockstep import Leader  # noqa: PLC0415 - the same

    at = seat(config, rank)
    [name] = nodes_of(config, rank, EngineKind.KV)
    with memory.given_back():
        node = _kv_node(config, name, settings, at.device, progress, copy)
    kernel = choose_attention(node, settings.attention)
    use_gpu_stream(at.device, StreamPriority.HIGH)
    [line] = copy.lines
    leader = Leader(line)
    return FollowerEngine(
        node,
        num_blocks=leader.agree(_pool_of(config, settings, node, None, at).blocks, node.dtype),
        block_size=settings.block_size,
        leader=leader,
        cpu_cores=at.cores,
        kernel=kernel,
    )


def _kv_node(
    config: DeploymentConfig,
    name: str,
    settings: EngineSettings,
    device: torch.device,
    progress: Progress,
    copy: "GroupMembership | None",
) -> "Node":
    """The node, or the part of it that is this rank's in `copy`."""
    peers: Peers | None = None
    if copy is not None:
        from workers.kv_engine.parallel.collectives import (  # noqa: PLC0415 - only here, and half a second
            TorchPeers,
        )

        peers = TorchPeers(copy.meeting, device)
    node: Node = _load(config, name, settings, device, progress, peers=peers)
    _check_length(config, node.max_positions)
    return node


def examine(config: DeploymentConfig) -> bool:
    """Refuse what a rank would refuse of its KV nodes before it reads a weight; whether they were looked at.

    A family of another package may not know how to: then it refuses to share what it cannot, and no more.

    Raises:
        CheckpointError: the checkpoint cannot be served, or not by so many ranks together.
        ConfigError: the configuration asks for what is not there.
    """
    copies = {
        (node, len(config.copy_of(rank)))
        for rank in config.ranks
        for node in nodes_of(config, rank, EngineKind.KV)
    }
    if not copies:
        return False
    import_transformers()
    nodes = registry.face(config.model, "nodes")
    look = getattr(nodes, "examine", None)
    for node, members in sorted(copies):
        if members > 1:
            _check_shares(config, nodes.load, node, members)
        if look is not None:
            _check_length(config, look(Path(config.checkpoint), node, members=members))
    return look is not None


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
            "leave tp_size away"
        )


def _by_kernels(node: "Node", settings: EngineSettings, at: Seat) -> "Node":
    """The node, computed by our own kernels where they are wanted and know it."""
    if settings.kernels == "torch":
        _LOGGER.info("%s is computed by torch: kernels is set so", node.name)
        return node
    if at.device.type == "cuda":
        from workers.kv_engine.gpu.fusion import use_gpu_kernels  # noqa: PLC0415 - where there is CUDA

        return use_gpu_kernels(node)
    from workers.cpu_kernels.decoder import use_cpu_kernels  # noqa: PLC0415 - brings transformers

    return use_cpu_kernels(node, threads=kernel_threads(node.parameters, at.cores))


def _pool_of(
    config: DeploymentConfig, settings: EngineSettings, node: "Node", draft: "Node | None", at: Seat
) -> PoolSize:
    """How large the pool is that there is room for."""
    device = at.device
    on_gpu = device.type == "cuda"
    size = pool_size(
        configured_tokens=config.kv_tokens,
        free_bytes=torch.cuda.mem_get_info(device)[0] if on_gpu else memory.available_bytes(),
        bytes_per_token=_kv_bytes(node) + (_kv_bytes(draft) if draft is not None else 0),
        block_size=settings.block_size,
        max_rows=settings.rows_on(device.type),
        max_seq_len=config.max_seq_len,
        on_gpu=on_gpu,
        sharers=at.pools,
    )
    _LOGGER.info("%s: %s in %s on %s; KV pool: %s", config.name, node.name, node.dtype, at, size.reason)
    if size.tokens < config.max_seq_len:
        _LOGGER.warning(
            "the KV pool holds %d tokens, fewer than max_seq_len %d: longer requests are refused",
            size.tokens,
            config.max_seq_len,
        )
    return size


def _kv_bytes(node: "Node") -> int:
    """What the keys and values of one token take."""
    layout = node.layout
    return 2 * layout.layers * layout.kv_heads * layout.head_dim * node.dtype.itemsize


def _draft(
    config: DeploymentConfig,
    served: "Node",
    settings: EngineSettings,
    at: Seat,
    progress: Progress,
) -> "Node | None":
    """The model that guesses for `served`, where there is one.

    Raises:
        CheckpointError: its checkpoint cannot be served.
        ConfigError: it speaks another vocabulary.
    """
    if not settings.speculate or settings.draft is None:
        return None
    smaller = msgspec.structs.replace(config, checkpoint=settings.draft)
    draft = _by_kernels(_load(smaller, served.name, settings, at.device, progress), settings, at)
    if draft.vocab_size != served.vocab_size:
        raise ConfigError(
            f"model_kwargs.draft: {settings.draft} has {draft.vocab_size} tokens, the served model "
            f"{served.vocab_size}: expected one with the same tokenizer"
        )
    return draft


def _proposer(
    draft: "Node | None", served: "Node", settings: EngineSettings, blocks: int, rows: int, step_tokens: int
) -> Proposer | None:
    """Who guesses, as the settings say."""
    if not settings.speculate:
        return None
    if draft is None:
        return PromptLookup()
    from workers.kv_engine.speculative.draft_model import DraftModel  # noqa: PLC0415 - brings transformers

    return DraftModel(
        draft,
        served=served.name,
        num_blocks=blocks,
        block_size=settings.block_size,
        max_sequences=rows,
        max_step_tokens=step_tokens,
        kernel=choose_attention(draft, settings.attention),
    )


def make_stateless_nodes(
    config: DeploymentConfig, settings: EngineSettings, rank: int, progress: Progress
) -> StatelessNodes:
    """Load the stateless nodes of `rank`, one after the other; called in their thread, as `make_kv_engine` is.

    Raises:
        CheckpointError: the checkpoint cannot be served.
        ConfigError: the configuration asks for what is not there.
    """
    at = seat(config, rank)
    names = nodes_of(config, rank, EngineKind.STATELESS)
    loaded = {name: _load(config, name, settings, at.device, progress) for name in names}
    use_gpu_stream(at.device, StreamPriority.LOW)
    nodes = StatelessNodes(
        loaded,
        at.device,
        with_kv_node=bool(nodes_of(config, rank, EngineKind.KV)),
        cpu_cores=at.cores,
    )
    _LOGGER.info("%s: %s on %s", config.name, ", ".join(names), at)
    return nodes


def _load(
    config: DeploymentConfig,
    node: str,
    settings: EngineSettings,
    device: torch.device,
    progress: Progress,
    *,
    peers: Peers | None = None,
) -> Any:
    """One node of the graph, as its family loads it; of a node that is shared, the part of a member.

    Raises:
        ConfigError: the family's nodes cannot be shared.
    """
    load = registry.face(config.model, "nodes").load
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
    )
