"""A family whose output depends on the batch, as floating-point output on a GPU does; without torch.

painter   a loop: an image from the one before it, emitted to the client, with an error of the batch's size
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from threading import Semaphore
from typing import Any, Final

import numpy as np
import pytest

from configs.deployment import DeploymentConfig
from configs.placement import NodeGroup
from models import registry
from models.base import CpuResult, EngineKind, ModelGraph, TextDecoder
from models.encoder_cache import CacheCounters
from shared.errors import DalSegnoError
from shared.events import OutputChunk, Usage, WalkCall, decode
from shared.meters import EncoderMeters, StepMeters
from shared.output_pieces import PieceAssembler
from shared.plans import Finish, Plan, PlanRequest, Walk
from shared.request_output import RequestOutput
from shared.tensors import Handle
from shared.walks import CLIENT, KEEP, Edge, Loop, Node, compile_walk
from shared.walks.language import OnResume
from tests.workers.cluster import Cluster, clustered
from tests.workers.harness import SUBJECTS, ByteDecoder
from tests.workers.mesh import Floats, array, floats, handle
from workers.data_plane.port import Array
from workers.generation.engine_client import EngineClient
from workers.kv_engine.counters import EngineStats
from workers.loading.model import Loaded
from workers.stateless_engine.firing import FiringResult, StatelessFiring
from workers.stateless_engine.scheduler import BatchKey
from workers.stateless_engine.stepped_runs import Stepper
from workers.stateless_engine.thread import StatelessThread

ERROR: Final = 2.0**-10
"""What each item of a batch adds to every pixel."""


def _plan(request: PlanRequest) -> Plan:
    yield Walk("paint")
    return Finish(usage=Usage(), finish_reasons=())


def painting(on_resume: OnResume) -> ModelGraph:
    """The graph: its images have to be reproduced, or stand."""
    loop = Loop(
        "paint",
        Node(
            "painter",
            ["image"],
            [
                Edge("image", "painter"),
                Edge("image", CLIENT("image"), on_resume=on_resume),
                Edge("sketch", KEEP),
            ],
        ),
        max_iters="images",
        outputs=["sketch"],
    )
    # `image` goes back within the loop and to the client at once; `sketch` is the last one.
    return ModelGraph(
        family="painting",
        nodes={"painter": EngineKind.STATELESS},
        walks={"paint": compile_walk("paint", loop)},
        plan=_plan,
    )


CONFIG: Final = DeploymentConfig(
    model="painting",
    name="painting-1",
    checkpoint="/nowhere",
    max_seq_len=128,
    node_groups=[NodeGroup(node_names=["painter"], ranks=[0])],
)


def paint(images: int, pixels: Sequence[float] = (1, 2, 3, 4)) -> WalkCall:
    return WalkCall(name="paint", inputs={"image": handle("image", list(pixels))}, args={"images": images})


@dataclass(slots=True)
class Painter:
    """The node (`workers.stateless_engine.thread.NodeRunner`).

    Attributes:
        batch: the number of items that it waits for, while `turns` holds it back.
        turns: so many more batches run; None is any number.
        advises: it shows progress (`progress`, or its steps) and a preview.
    """

    limit: int = 8
    advises: bool = False
    progress: dict[str, Any] | None = None
    turns: Semaphore | None = None
    batches: list[int] = field(default_factory=list)

    @property
    def max_batch(self) -> Mapping[str, int]:
        return {"painter": self.limit}

    @property
    def max_cost(self) -> Mapping[str, float]:
        return {}

    @property
    def steppers(self) -> Mapping[str, Stepper]:
        return {}

    def batch_key(self, firing: StatelessFiring) -> BatchKey:
        return BatchKey()

    def encoder_caches(self) -> Sequence[CacheCounters]:
        return ()

    def run(self, node: str, firings: Sequence[StatelessFiring]) -> list[FiringResult | DalSegnoError]:
        self.batches.append(len(firings))
        if self.turns is not None:
            self.turns.acquire(timeout=20)
        return [self._painted(firing, len(firings)) for firing in firings]

    def _painted(self, firing: StatelessFiring, batch: int) -> FiringResult:
        given = firing.inputs["image"]
        assert isinstance(given, Array)
        image = array(after(floats(given), batch))
        outputs = {"image": image, "sketch": image}
        if not self.advises:
            return FiringResult(outputs=outputs)
        progress = self.progress or {"step": firing.path[-1] + 1, "steps": firing.args["images"]}
        sketch = array(floats(given)[:1] * np.float32(1.5))
        return FiringResult(outputs=outputs, progress=progress, previews={"sketch": sketch})


def after(image: Floats, batch: int = 1) -> Floats:
    """The image that follows `image`, painted in a batch of this size."""
    next_image: Floats = image * np.float32(1.5) + np.float32(batch * ERROR)
    return next_image


class NoProcessing:
    """The family has no CPU node."""

    eos_ids = ()
    tool_calls = ""

    def run(self, node: str, key: str, inputs: Mapping[str, Handle], args: Mapping[str, Any]) -> CpuResult:
        raise AssertionError(node)

    def text_decoder(self) -> TextDecoder:
        return ByteDecoder()


@dataclass(slots=True)
class PaintingModel:
    """What a rank hosts of it."""

    graph: ModelGraph
    painter: Painter = field(default_factory=Painter)
    progress: float = 1.0
    _thread: StatelessThread | None = None

    def counters(self) -> EngineStats | None:
        return None

    def encoder_caches(self) -> EncoderMeters:
        return EncoderMeters()

    def stepped_nodes(self) -> dict[str, StepMeters]:
        return {}

    async def load(self, rows: EngineClient) -> Loaded:
        self._thread = StatelessThread(lambda: self.painter)
        await self._thread.start()
        return Loaded(graph=self.graph, processing=NoProcessing(), engine=None, stateless=self._thread)

    @property
    def under_way(self) -> int:
        """The firings that are queued or running."""
        return len(self._thread._under_way) if self._thread is not None else 0

    async def wait(self) -> None:
        assert self._thread is not None
        await self._thread.wait()

    async def close(self) -> None:
        if self.painter.turns is not None:
            self.painter.turns.release(1000)
        if self._thread is not None:
            await self._thread.close()


@asynccontextmanager
async def studio(on_resume: OnResume) -> AsyncIterator[Cluster]:
    """One worker that hosts the family."""
    graph = painting(on_resume)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(registry, "graph", lambda family: graph)
        async with clustered(graph, CONFIG, lambda *_: PaintingModel(graph), ranks=(0,)) as cluster:
            yield cluster


def model_of(cluster: Cluster) -> PaintingModel:
    model = cluster.members[0].model
    assert isinstance(model, PaintingModel)
    return model


def output_of(cluster: Cluster, request_id: str) -> tuple[RequestOutput, list[OutputChunk]]:
    """A request's output as every reader folds it, and its valid chunks."""
    output, chunks = RequestOutput(), list[OutputChunk]()
    for record in cluster.server.records:
        address = SUBJECTS.parse(record.subject)
        if address is not None and address.request_id == request_id:
            chunks += output.fold(address, decode(record.data))
    return output, chunks


def images(chunks: Sequence[OutputChunk]) -> list[Floats]:
    """The images in an output, as a client assembles them."""
    assembler, found = PieceAssembler[OutputChunk](), list[Floats]()
    for chunk in chunks:
        if (pieces := assembler.push(chunk.metadata, chunk)) is not None:
            data = b"".join(piece.data or b"" for piece in pieces)
            found.append(np.frombuffer(data, "<f4").reshape(chunk.metadata["shape"]))
    return found
