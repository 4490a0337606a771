"""The model that a worker hosts: the nodes placed on its rank, loaded on this machine, and their engines.

Processing (tokenizer, templates) loads in a thread. Concurrently each engine is made in its own thread,
where the rank has nodes for it. Nothing here blocks the event loop or imports torch on its side (see
`workers.loading.engines`).

Stateless nodes load first, because the size of the KV pool follows from the memory that is left. Meanwhile
the files are digested (`workers.loading.weights`).
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from configs.deployment import ConfigError, DeploymentConfig
from models import registry
from models.base import EngineKind, MediaReader, ModelGraph, Processing
from shared.meters import EncoderMeters, StepMeters
from workers.generation.engine_client import EngineClient, EnginePort
from workers.kv_engine.counters import EngineStats
from workers.kv_engine.thread import EngineThread
from workers.loading.prefix_warmup import warm
from workers.loading.weights import RankWeights
from workers.machine import read_ahead
from workers.settings import EngineSettings
from workers.stateless_engine.thread import StatelessThread
from workers.tensor_parallel.group import GroupMembership

if TYPE_CHECKING:
    from workers.kv_engine.engine import KVEngine
    from workers.kv_engine.engine_group import EngineGroup
    from workers.kv_engine.kv_transfer import Allocate
    from workers.stateless_engine.nodes import StatelessNodes

_LOGGER: Final = logging.getLogger(__name__)

PROCESSING_MEMBERS: Final = ("eos_ids", "tool_calls", "run", "text_decoder")
"""The members of `Processing`, all required."""

LOG_PROGRESS_S: Final = 2.0
"""The period of log lines about the progress of a big checkpoint; heartbeats carry it, too."""


def unchecked() -> None:
    """Check nothing: the weights were copied, for example to a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A model that is ready to serve.

    Attributes:
        engine: the engine of the rank's KV nodes; None without any.
        stateless: the engine of its stateless nodes; None without any.
        weights: by node, the digest of what was loaded for it.
        check_weights: raises `CheckpointReplacedError` if the loaded weights have been written to since.
    """

    graph: ModelGraph
    processing: Processing
    engine: EnginePort | None
    stateless: StatelessThread | None = None
    kv_tokens: int = 0
    device: str = "cpu"
    weights: Mapping[str, str] = field(default_factory=dict)
    check_weights: Callable[[], None] = unchecked


class Model(Protocol):
    """The model that a worker hosts (`LocalModel`)."""

    @property
    def progress(self) -> float:
        """The loaded share, from 0 to 1."""
        ...

    def counters(self) -> EngineStats | None: ...

    def encoder_caches(self) -> EncoderMeters:
        """The counters of the encoder caches of its stateless nodes."""
        ...

    def stepped_nodes(self) -> dict[str, StepMeters]:
        """The counters of its nodes that run in steps, by name."""
        ...

    async def load(self, client: EngineClient) -> Loaded:
        """Load the model; the engine delivers its outputs to `client`."""
        ...

    async def wait(self) -> None:
        """Wait until an engine has died, and raise its error."""
        ...

    async def close(self) -> None: ...


@dataclass(slots=True)
class LocalModel:
    """A model on this machine; each engine has a thread.

    Attributes:
        export_to: allocates the slots for exported keys and values (`TensorStore.allocate`).
        gather: gathers the tensor-parallel group, where the KV node is shared.
        media: reads the media of requests; None where none are taken.
    """

    config: DeploymentConfig
    settings: EngineSettings
    rank: int
    export_to: "Allocate | None" = None
    gather: Callable[[], Awaitable[GroupMembership]] | None = None
    media: MediaReader | None = None
    progress: float = 0.0
    _weights: RankWeights | None = field(default=None, init=False)
    _group: GroupMembership | None = field(default=None, init=False)
    _thread: EngineThread | None = field(default=None, init=False)
    _stateless: StatelessThread | None = field(default=None, init=False)
    _device: str = field(default="cpu", init=False)
    _kv_tokens: int = field(default=0, init=False)
    _nodes: list[str] = field(default_factory=list, init=False)
    _logged_s: float | None = field(default=None, init=False)

    def counters(self) -> EngineStats | None:
        return self._thread.stats() if self._thread is not None else None

    def encoder_caches(self) -> EncoderMeters:
        return self._stateless.encoder_caches() if self._stateless is not None else EncoderMeters()

    def stepped_nodes(self) -> dict[str, StepMeters]:
        return self._stateless.stepped_nodes() if self._stateless is not None else {}

    async def load(self, client: EngineClient) -> Loaded:
        begun_s = time.monotonic()
        self._nodes = [*self._nodes_of(EngineKind.STATELESS), *self._nodes_of(EngineKind.KV)]
        self._weights = await asyncio.to_thread(RankWeights.open, self.config, self.settings, self.rank)
        self._weights.begin()
        try:
            if self._nodes:
                read_ahead.begin(Path(self.config.checkpoint))
            processing, kv_tokens = await self._load_nodes(client)
            weights = await asyncio.to_thread(self._weights.loaded)
        except BaseException:
            self._weights.close()
            raise
        self.progress = 1.0
        _LOGGER.info("loaded %s in %.1f s", self.config.name, time.monotonic() - begun_s)
        return Loaded(
            graph=registry.graph(self.config.model),
            processing=processing,
            engine=self._thread,
            stateless=self._stateless,
            kv_tokens=kv_tokens,
            device=self._device,
            weights=weights,
            check_weights=self._weights.check_unwritten if self._device == "cpu" else unchecked,
        )

    async def _load_nodes(self, client: EngineClient) -> tuple[Processing, int]:
        """Load processing and all engines; return processing, and the capacity of the KV pool in tokens."""
        kv_tokens = 0
        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(asyncio.to_thread(self._load_processing), name="processing")
            if self._nodes_of(EngineKind.STATELESS):
                await self._start_stateless()
            if self._nodes_of(EngineKind.KV):
                if self.gather is not None:
                    self._group = await self.gather()
                watching = [tasks.create_task(self._group.watch())] if self._group is not None else []
                kv_tokens = await self._start_engine(client)
                for task in watching:
                    task.cancel()
        if self._nodes_of(EngineKind.KV) and self.settings.warm_prefixes:
            client.engine = self._thread
            node = self._nodes_of(EngineKind.KV)[0]
            await warm(self.settings.warm_prefixes, reading.result(), client, node=node, longest=kv_tokens)
        return reading.result(), kv_tokens

    async def wait(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                for thread in self._threads():
                    tasks.create_task(thread.wait())
                if self._group is not None:
                    tasks.create_task(self._group.watch())
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None

    async def close(self) -> None:
        if self._weights is not None:
            self._weights.close()
        for thread in self._threads():
            await thread.close()
        if self._group is not None:
            self._group.close()

    def _nodes_of(self, kind: EngineKind) -> list[str]:
        kinds = registry.graph(self.config.model).nodes
        return [node for node in self.config.nodes_of(self.rank) if kinds[node] is kind]

    def _threads(self) -> "list[EngineThread | StatelessThread]":
        return [thread for thread in (self._thread, self._stateless) if thread is not None]

    def _load_processing(self) -> Processing:
        loaded = registry.load_processing(
            self.config.model,
            Path(self.config.checkpoint),
            max_seq_len=self.config.max_seq_len,
            voices=self.config.known_voices if self.config.voices else (),
            media=self.media,
            kwargs=self.config.model_kwargs,
            device_bytes=self._device_bytes,
        )
        _check_members(loaded, self.config.model)
        return loaded

    def _device_bytes(self) -> int:
        """The memory of this rank's device."""
        from workers.machine.devices import choose_device, device_bytes  # noqa: PLC0415 - torch

        return device_bytes(choose_device(self.config, self.rank))

    async def _start_stateless(self) -> None:
        """Start the stateless engine's thread."""
        thread = StatelessThread(self._make_stateless)
        await thread.start()
        self._stateless = thread

    async def _start_engine(self, client: EngineClient) -> int:
        """Start the engines' thread, and return the capacity of the smallest KV pool in tokens."""
        thread = EngineThread(
            self._make_engine, client.on_outputs, client.on_error, on_cancelled=client.on_cancelled
        )
        await thread.start()
        self._thread = thread
        return self._kv_tokens

    def _make_engine(self) -> "KVEngine | EngineGroup":
        """Called in the engines' thread."""
        from workers.kv_engine.engine_group import EngineGroup  # noqa: PLC0415 - imports torch, as the next one
        from workers.loading.engines import make_kv_engines  # noqa: PLC0415 - see `workers.loading.engines`

        assert self._weights is not None
        engines = make_kv_engines(
            self.config,
            self.settings,
            self.rank,
            self._on_progress,
            export_to=self.export_to,
            group=self._group,
            weights=self._weights.digest_of,
        )
        one, *others = engines.values()
        self._device = str(one.node.device)
        self._kv_tokens = min(engine.stats().kv_total for engine in engines.values())
        return EngineGroup(engines) if others else one

    def _make_stateless(self) -> "StatelessNodes":
        """Called in the stateless engine's thread."""
        from workers.loading.engines import make_stateless_nodes  # noqa: PLC0415 - torch: see `workers.loading.engines`

        nodes = make_stateless_nodes(self.config, self.settings, self.rank, self._on_progress)
        self._device = str(nodes.device)
        return nodes

    def _on_progress(self, done: int, total: int, node: str) -> None:
        """Note the progress of a node. Called from the loader's threads; nodes load one after the other."""
        self.progress = (self._nodes.index(node) + done / max(total, 1)) / len(self._nodes)
        now_s = time.monotonic()
        if self._logged_s is None:
            self._logged_s = now_s  # a quick load logs nothing
        elif now_s - self._logged_s >= LOG_PROGRESS_S:
            self._logged_s = now_s
            _LOGGER.info("loading %s: %.0f %% of %.2f GB", node, done / max(total, 1) * 100, total / 1e9)


def _check_members(processing: Processing, family: str) -> None:
    """Check that a family's processing has all members.

    Raises:
        ConfigError: a member is missing.
    """
    missing = [name for name in PROCESSING_MEMBERS if not hasattr(processing, name)]
    if missing:
        raise ConfigError(
            f"model family {family}: {type(processing).__name__}, which its processing.load returned, has no "
            f"{', '.join(missing)}: expected {', '.join(PROCESSING_MEMBERS)}; see docs/adding-a-model.md"
        )
