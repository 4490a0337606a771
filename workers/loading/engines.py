"""Engines over a rank's nodes: the KV engine, the engine of a tensor-parallel follower, the stateless nodes.

Imported and called in the engines' threads: torch takes seconds to import, and the event loop must not wait
for it. A rank without a KV node does not import transformers.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from configs.deployment import ConfigError, DeploymentConfig
from models.base import EngineKind
from workers.kv_engine.attention.kernels import AttentionKernel, choose_attention
from workers.kv_engine.config import KVEngineConfig
from workers.kv_engine.gpu.cuda_streams import StreamPriority, use_gpu_stream
from workers.kv_engine.speculative.payoff import LONGEST
from workers.kv_engine.speculative.proposer import PromptLookup, Proposer
from workers.loading import device_share, node_loading
from workers.loading.device_share import DeviceShare
from workers.loading.lean_transformers import import_transformers
from workers.loading.node_loading import Progress
from workers.machine import memory
from workers.machine.cpu_threads import stateless_threads, threads_for, use_cpu_threads
from workers.machine.kv_pool_size import PoolSize, pool_size
from workers.settings import EngineSettings
from workers.stateless_engine.nodes import StatelessNodes

if TYPE_CHECKING:
    from workers.kv_engine.engine import KVEngine
    from workers.kv_engine.gpu.cuda_graphs import GraphCapture
    from workers.kv_engine.kv_transfer import Allocate
    from workers.kv_engine.node import KVNode
    from workers.kv_engine.parallel.follower import FollowerEngine
    from workers.kv_engine.parallel.lockstep import Followers
    from workers.kv_engine.programs.towers import Tower
    from workers.tensor_parallel.group import GroupMembership

_LOGGER: Final = logging.getLogger(__name__)


def make_kv_engines(
    config: DeploymentConfig,
    settings: EngineSettings,
    rank: int,
    progress: Progress,
    *,
    export_to: "Allocate | None" = None,
    group: "GroupMembership | None" = None,
    weights: Callable[[str], str] = lambda _: "",
) -> "dict[str, KVEngine]":
    """Load the KV nodes of `rank`, and make an engine for each; return them by node.

    Called in the engines' thread, which then computes on its own GPU stream. `export_to` allocates the
    slots that exported keys and values are written to. `group` is the tensor-parallel group that shares the
    rank's only KV node; this rank leads it. `weights` returns the digest of what a node loaded.

    Raises:
        GroupLostError: a member of the group is gone.
        CheckpointError: the checkpoint cannot be served.
        ConfigError: the configuration does not fit the machine or the model.
    """
    import_transformers()
    from workers.kv_engine.parallel.lockstep import Followers  # noqa: PLC0415 - imports transformers

    share = device_share.of(config, rank)
    node_loading.check_device(settings, share.device)
    names = device_share.nodes_of(config, rank, EngineKind.KV)
    loaded = [_load_served(config, settings, name, share, progress, group) for name in names]
    use_gpu_stream(share.device, StreamPriority.HIGH)
    # All sizes are chosen before the first pool takes memory.
    sizes = [_kv_pool_size(config, settings, one.node, one.kv_bytes, share).blocks for one in loaded]
    followers = Followers(group.connections) if group is not None else None
    if followers is not None:
        sizes = [followers.agree(sizes[0], loaded[0].node.dtype, weights(names[0]))]
    cores = _cores_of(config, rank, share)
    engines = {
        name: _engine_of(settings, one, blocks, share, cores, followers, export_to, adapter_bytes(config))
        for name, one, blocks in zip(names, loaded, sizes, strict=True)
    }
    if share.device.type == "cpu":  # each has set them for its own node: the largest decides
        use_cpu_threads(threads_for(max(one.node.parameters for one in loaded), cores))
    return engines


def adapter_bytes(config: DeploymentConfig) -> int:
    """The most memory of adapters on a rank; 0 if it takes none."""
    return config.adapters_memory_bytes if config.takes_adapters else 0


def _cores_of(config: DeploymentConfig, rank: int, share: DeviceShare) -> int:
    """The cores for the KV nodes of a rank, which may have stateless nodes, too."""
    if not device_share.nodes_of(config, rank, EngineKind.STATELESS):
        return share.cores
    return max(1, share.cores - stateless_threads(share.cores, with_kv_node=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Served:
    """A loaded KV node, the attention kernel of its layers, and the models beside it.

    Attributes:
        draft: drafts tokens for it.
        towers: computes passes of its programs.
    """

    node: "KVNode"
    kernel: AttentionKernel | None
    draft: "KVNode | None"
    towers: "Mapping[str, Tower]"

    @property
    def kv_bytes(self) -> int:
        """The bytes of one token's keys and values in all pools of the node."""
        beside = [tower.node for tower in self.towers.values()]
        return sum(_kv_bytes(one) for one in (self.node, self.draft, *beside) if one is not None)


def _load_served(
    config: DeploymentConfig,
    settings: EngineSettings,
    name: str,
    share: DeviceShare,
    progress: Progress,
    group: "GroupMembership | None",
) -> _Served:
    with memory.given_back():
        # On a CPU, one call computes all layers, within which members exchange sums; adapters hook into the
        # stock modules.
        has_kernels = (group is None or share.device.type == "cuda") and not config.takes_adapters
        node = node_loading.load_kv_node(
            *(config, name, settings, share.device, progress, group),
            leaves_weights=has_kernels and node_loading.can_leave_weights(config, settings, share.device),
        )
        kernel = choose_attention(node, settings.attention)
        if has_kernels:
            node = node_loading.with_kernels(node, settings, share, quantised_from=config)
        elif config.takes_adapters:
            _LOGGER.info("%s is computed by torch, because it takes adapters", node.name)
        _check_programs(node, settings)
        if _asks_for_drafts(settings):
            _check_drafts(node, settings)
        _check_handover(config, name, node)
        towers = _towers(node, settings, share)
        draft = _draft_model(config, node, settings, share, progress)
    return _Served(node=node, kernel=kernel, draft=draft, towers=towers)


def _check_programs(node: "KVNode", settings: EngineSettings) -> None:
    from workers.kv_engine.node import token_programs_of  # noqa: PLC0415 - imports transformers

    if _asks_for_drafts(settings) and token_programs_of(node):
        raise ConfigError(
            f"model_kwargs.speculative_tokens is {settings.speculative_tokens}, but {node.architecture} "
            "generates several tokens at a time, so none are drafted: leave it out"
        )


def _asks_for_drafts(settings: EngineSettings) -> bool:
    return bool(settings.speculative_tokens) and not settings.drafts_have_to_pay


def _most_drafts(settings: EngineSettings, node: "KVNode") -> int:
    """Return the most tokens that are drafted per sequence and step."""
    if settings.speculative_tokens != "auto":
        return settings.speculative_tokens
    from workers.cpu_kernels.decoder import NativeDecoder  # noqa: PLC0415 - imports transformers
    from workers.kv_engine.node import has_head, token_programs_of  # noqa: PLC0415 - the same

    can_draft = (
        isinstance(node, NativeDecoder)
        and has_head(node)
        and not token_programs_of(node)
        and not node.layout.states
    )
    return LONGEST if can_draft else 0


def _draft_model(
    config: DeploymentConfig,
    node: "KVNode",
    settings: EngineSettings,
    share: DeviceShare,
    progress: Progress,
) -> "KVNode | None":
    """Load the model that drafts tokens for a node; None if there is none, or nothing is drafted."""
    if settings.draft_model is None:
        return None
    if not _most_drafts(settings, node):
        _LOGGER.warning(
            "model_kwargs.draft_model is not used for %s: with speculative_tokens %s nothing is drafted for "
            "it; set a number",
            node.name,
            settings.speculative_tokens,
        )
        return None
    draft = node_loading.load_draft_model(config, node, settings, share, progress)
    if draft is not None:
        _check_drafts(draft, settings)
    return draft


def _check_drafts(node: "KVNode", settings: EngineSettings) -> None:
    if node.layout.states:
        raise ConfigError(
            f"model_kwargs.speculative_tokens is {settings.speculative_tokens}, but {node.architecture} has "
            "recurrent states, which cannot go back where drafted tokens are rejected: leave it out"
        )


def _check_handover(config: DeploymentConfig, name: str, node: "KVNode") -> None:
    placed = [group for group in config.groups if name in group.nodes]
    if len(placed) > 1 and any(group.followers for group in placed) and node.layout.states:
        raise ConfigError(
            f"node_groups: {name!r} is placed in {len(placed)} groups, one of them with tp_size, but "
            f"{node.architecture} has recurrent states, which such a group cannot hand over: leave tp_size "
            "out, or place the node in one group for all walks"
        )


def _towers(node: "KVNode", settings: EngineSettings, share: DeviceShare) -> "dict[str, Tower]":
    """Return the node's companion models as they are served: with our kernels, as the node itself."""
    from workers.kv_engine.node import towers_of  # noqa: PLC0415 - imports transformers
    from workers.kv_engine.programs.towers import Tower  # noqa: PLC0415 - the same

    return {
        name: Tower(
            kernel=choose_attention(tower, settings.attention),
            node=node_loading.with_kernels(tower, settings, share),
        )
        for name, tower in towers_of(node).items()
    }


def _engine_of(
    settings: EngineSettings,
    served: _Served,
    blocks: int,
    share: DeviceShare,
    cpu_cores: int,
    followers: "Followers | None",
    export_to: "Allocate | None",
    most_of_adapters: int,
) -> "KVEngine":
    """Make the engine of a loaded node over a pool of so many blocks."""
    from workers.kv_engine.engine import KVEngine  # noqa: PLC0415 - imports transformers

    device = share.device
    sequences = settings.max_sequences_on(device.type)
    step_tokens = settings.max_step_tokens_on(device.type)
    return KVEngine(
        served.node,
        KVEngineConfig(
            num_blocks=blocks,
            block_size=settings.block_size,
            max_step_tokens=step_tokens,
            max_sequences=sequences,
            cpu_cores=cpu_cores,
            prefix_cache=settings.prefix_cache,
            state_snapshots=settings.state_snapshots_on(device.type),
            decode_slowdown_limit=settings.decode_slowdown_limit,
            speculative_tokens=_most_drafts(settings, served.node),
            drafts_have_to_pay=settings.drafts_have_to_pay,
            max_pass_tokens=settings.max_pass_tokens,
            adapter_bytes=most_of_adapters,
        ),
        export_to=export_to,
        proposer=_proposer(served.draft, served.node, settings, blocks, sequences, step_tokens),
        followers=followers,
        capture=_graph_capture(settings, device, served.node, served.kernel),
        kernel=served.kernel,
        towers=served.towers,
    )


def make_follower_engine(
    config: DeploymentConfig,
    settings: EngineSettings,
    rank: int,
    progress: Progress,
    group: "GroupMembership",
    weights: Callable[[str], str] = lambda _: "",
) -> "FollowerEngine":
    """Load this rank's part of the shared KV node, and make the engine that follows the group's leader.

    Called in the engine's thread, as `make_kv_engines` is.

    Raises:
        GroupLostError: a member of the group is gone.
        CheckpointError: the checkpoint cannot be served.
        ConfigError: the configuration does not fit the machine or the model.
    """
    import_transformers()
    from workers.kv_engine.parallel.follower import FollowerEngine  # noqa: PLC0415 - imports transformers
    from workers.kv_engine.parallel.lockstep import Leader  # noqa: PLC0415 - the same

    share = device_share.of(config, rank)
    [name] = device_share.nodes_of(config, rank, EngineKind.KV)
    with memory.given_back():
        node = node_loading.load_kv_node(config, name, settings, share.device, progress, group)
        kernel = choose_attention(node, settings.attention)
        if share.device.type == "cuda" and not config.takes_adapters:
            node = node_loading.with_kernels(node, settings, share)
    use_gpu_stream(share.device, StreamPriority.HIGH)
    [connection] = group.connections
    leader = Leader(connection)
    blocks = _kv_pool_size(config, settings, node, _kv_bytes(node), share).blocks
    return FollowerEngine(
        node,
        num_blocks=leader.agree(blocks, node.dtype, weights(name)),
        block_size=settings.block_size,
        max_step_tokens=settings.max_step_tokens_on(share.device.type),
        max_sequences=settings.max_sequences_on(share.device.type),
        leader=leader,
        cpu_cores=share.cores,
        kernel=kernel,
        states=_state_slots(settings, share.device),
        capture=_graph_capture(settings, share.device, node, kernel),
    )


def make_stateless_nodes(
    config: DeploymentConfig, settings: EngineSettings, rank: int, progress: Progress
) -> StatelessNodes:
    """Load the stateless nodes of `rank`, one after the other. Called in their thread.

    Raises:
        CheckpointError: the checkpoint cannot be served.
        ConfigError: the configuration does not fit the machine or the model.
    """
    share = device_share.of(config, rank)
    names = device_share.nodes_of(config, rank, EngineKind.STATELESS)
    loaded = {name: node_loading.load_node(config, name, settings, share.device, progress) for name in names}
    use_gpu_stream(share.device, StreamPriority.LOW)
    nodes = StatelessNodes(
        loaded,
        share.device,
        with_kv_node=bool(device_share.nodes_of(config, rank, EngineKind.KV)),
        cpu_cores=share.cores,
    )
    _LOGGER.info("%s: %s on %s", config.name, ", ".join(names), share)
    return nodes


def _kv_pool_size(
    config: DeploymentConfig,
    settings: EngineSettings,
    node: "KVNode",
    kv_bytes: int,
    share: DeviceShare,
) -> PoolSize:
    """Choose the size of the KV pool by the memory that is free now."""
    device = share.device
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()  # what loading has freed counts as taken otherwise
    free_bytes = torch.cuda.mem_get_info(device)[0] if on_gpu else memory.available_bytes()
    size = pool_size(
        configured_tokens=config.kv_tokens,
        free_bytes=free_bytes - _state_bytes(config, settings, node, free_bytes),
        bytes_per_token=max(kv_bytes, 1),  # layers may have recurrent states alone
        block_size=settings.block_size,
        max_sequences=settings.max_sequences_on(device.type),
        max_seq_len=config.max_seq_len,
        on_gpu=on_gpu,
        sharers=share.kv_pools,
    )
    _LOGGER.info("%s: %s in %s on %s; KV pool: %s", config.name, node.name, node.dtype, share, size.reason)
    if size.tokens < config.max_seq_len:
        _LOGGER.warning(
            "the KV pool holds %d tokens, fewer than max_seq_len %d: longer requests are refused",
            size.tokens,
            config.max_seq_len,
        )
    return size


def _kv_bytes(node: "KVNode") -> int:
    """Return the bytes of one token's keys and values."""
    from workers.kv_engine.node import kv_dtype_of  # noqa: PLC0415 - imports transformers

    return node.layout.numbers * kv_dtype_of(node).itemsize


def _state_slots(settings: EngineSettings, device: torch.device) -> int:
    """Return the number of slots for recurrent states, of sequences and of snapshots."""
    return settings.max_sequences_on(device.type) + settings.state_snapshots_on(device.type)


def _state_bytes(config: DeploymentConfig, settings: EngineSettings, node: "KVNode", free_bytes: int) -> int:
    """Return the bytes of all slots for recurrent states.

    Raises:
        ConfigError: they do not fit into the free memory.
    """
    each, slots = node.layout.state_bytes(node.dtype.itemsize), _state_slots(settings, node.device)
    if not each:
        return 0
    _LOGGER.info(
        "%s: %s keeps %.1f MiB of recurrent states per sequence, in %d slots",
        config.name,
        node.name,
        each / 2**20,
        slots,
    )
    if each * slots > free_bytes:
        raise ConfigError(
            f"the recurrent states of {slots} slots take {each * slots / 2**30:.2f} GiB, but "
            f"{free_bytes / 2**30:.2f} GiB are free: lower model_kwargs.max_sequences or "
            "model_kwargs.state_snapshots"
        )
    return each * slots


def _graph_capture(
    settings: EngineSettings, device: torch.device, node: "KVNode", kernel: AttentionKernel | None
) -> "GraphCapture | None":
    """Return the recorder of steps. It needs a GPU and an attention kernel; torch's syncs."""
    from workers.kv_engine.node import has_head  # noqa: PLC0415 - imports transformers

    if device.type != "cuda" or kernel is None or not settings.cuda_graphs:
        return None
    if node.layout.states:  # its layers run Python per batch of sequences
        return None
    if not has_head(node):  # it decodes nothing
        return None
    from workers.kv_engine.gpu.cuda_graphs import CudaCapture  # noqa: PLC0415 - needs CUDA

    return CudaCapture(device)


def _proposer(
    draft: "KVNode | None",
    served: "KVNode",
    settings: EngineSettings,
    blocks: int,
    sequences: int,
    step_tokens: int,
) -> Proposer | None:
    """Return the source of draft tokens that the settings ask for."""
    if not _most_drafts(settings, served):
        return None
    if draft is None:
        return PromptLookup()
    from workers.kv_engine.speculative.draft_model import DraftModel  # noqa: PLC0415 - imports transformers

    return DraftModel(
        draft,
        served=served.name,
        num_blocks=blocks,
        block_size=settings.block_size,
        max_sequences=sequences,
        max_step_tokens=step_tokens,
        kernel=choose_attention(draft, settings.attention),
    )
