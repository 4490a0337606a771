"""What a worker hosts: the model of a deployment, loaded on this machine.

The CPU face is read in a thread, beside the engine, which is made in a thread of its own. Nothing here
blocks the event loop, and no torch is imported on its side (see `workers.hosting`).
"""

import asyncio
import logging
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from shared.config import ConfigError, DeploymentConfig
from shared.models import registry
from shared.models.base import EngineKind, ModelGraph, Processing
from workers.engine.outcomes import EngineStats
from workers.engine.thread import EngineThread
from workers.rows import EnginePort, Rows
from workers.settings import EngineSettings

if TYPE_CHECKING:
    from workers.engine.kv_engine import KVEngine

_LOGGER: Final = logging.getLogger(__name__)

SAY_EVERY_S: Final = 2.0
"""How often it is logged how far a big checkpoint is; the beats tell it all the time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A model that can serve."""

    graph: ModelGraph
    processing: Processing
    engine: EnginePort | None
    kv_tokens: int = 0
    device: str = "cpu"


class Model(Protocol):
    """What a worker hosts (`LocalModel`)."""

    @property
    def progress(self) -> float:
        """How much of it is loaded, from 0 to 1."""
        ...

    def counters(self) -> EngineStats | None: ...

    async def load(self, rows: Rows) -> Loaded:
        """Load it; tokens go to `rows`."""
        ...

    async def wait(self) -> None:
        """Wait until the engine has died, and raise what of."""
        ...

    async def close(self) -> None: ...


@dataclass(slots=True)
class LocalModel:
    """Processing in this thread's reach, the engine in its own."""

    config: DeploymentConfig
    settings: EngineSettings
    rank: int
    progress: float = 0.0
    _thread: EngineThread | None = field(default=None, init=False)
    _device: str = field(default="cpu", init=False)
    _said_s: float | None = field(default=None, init=False)

    def counters(self) -> EngineStats | None:
        return self._thread.stats() if self._thread is not None else None

    async def load(self, rows: Rows) -> Loaded:
        begun_s = time.monotonic()
        graph = registry.graph(self.config.model)
        kinds = {graph.nodes[node] for node in self.config.nodes_of(self.rank)}
        if EngineKind.STATELESS in kinds:
            raise ConfigError(f"{self.config.model} needs the stateless engine, which is not there yet")
        kv_tokens = 0
        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(asyncio.to_thread(self._load_processing), name="processing")
            if EngineKind.KV in kinds:
                kv_tokens = await self._start_engine(rows)
        self.progress = 1.0
        _LOGGER.info("loaded %s in %.1f s", self.config.name, time.monotonic() - begun_s)
        return Loaded(
            graph=graph,
            processing=reading.result(),
            engine=self._thread,
            kv_tokens=kv_tokens,
            device=self._device,
        )

    async def wait(self) -> None:
        if self._thread is not None:
            await self._thread.wait()

    async def close(self) -> None:
        if self._thread is not None:
            await self._thread.close()

    def _load_processing(self) -> Processing:
        face = registry.face(self.config.model, "processing")
        loaded: Processing = face.load(Path(self.config.checkpoint), max_seq_len=self.config.max_seq_len)
        return loaded

    async def _start_engine(self, rows: Rows) -> int:
        """Start the engine's thread; how many tokens its pool holds."""
        thread = EngineThread(
            self._make_engine, rows.on_outputs, rows.on_error, on_cancelled=rows.on_cancelled
        )
        engine = await thread.start()
        self._thread = thread
        return engine.stats().kv_total

    def _make_engine(self) -> "KVEngine":
        """Called in the engine's thread."""
        from workers.hosting import make_engine  # noqa: PLC0415 - torch: see `workers.hosting`

        engine = make_engine(self.config, self.settings, self.rank, self._on_progress)
        self._device = str(engine.node.device)
        return engine

    def _on_progress(self, done: int, total: int, name: str) -> None:
        """Called from the loader's threads."""
        self.progress = done / max(total, 1)
        now_s = time.monotonic()
        if self._said_s is None:
            self._said_s = now_s  # what loads at once needs no word
        elif now_s - self._said_s >= SAY_EVERY_S:
            self._said_s = now_s
            _LOGGER.info("loading %s: %.0f %% of %.2f GB", self.config.name, self.progress * 100, total / 1e9)
