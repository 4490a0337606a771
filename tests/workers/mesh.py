"""A family of arithmetic for many ranks: stateless nodes on arrays of float32, without torch.

branches   left | right -> join                          a Parallel, and a CPU node behind it
refine     (pull | push) -> mix, in a loop                mix stops it early
polish     the same, with checkpoints                     nothing of it is emitted
count      a loop: counter streams its numbers            to three takers, by three policies
fixed, sliding, left                                      a taker each: sums of its chunks, till enough
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from threading import Event
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from configs.deployment import DeploymentConfig
from configs.placement import NodeGroup
from models.base import CpuResult, EngineKind, ModelGraph, TextDecoder
from models.encoder_cache import CacheCounters
from shared.errors import DalSegnoError, WorkerError
from shared.events import Usage
from shared.meters import EncoderMeters, StepMeters
from shared.plans import Finish, Plan, PlanRequest, Walk
from shared.tensors import Handle
from shared.walks import (
    CLIENT,
    KEEP,
    ChunkPolicy,
    Edge,
    Fixed,
    LeftContext,
    Loop,
    Node,
    Parallel,
    Sequential,
    SlidingWindow,
    StreamingEdge,
    StreamInput,
    compile_walk,
)
from tests.workers.harness import ByteDecoder
from workers.data_plane.port import Array
from workers.generation.engine_client import EngineClient
from workers.kv_engine.counters import EngineStats
from workers.loading.model import Loaded
from workers.stateless_engine.firing import FiringResult, StatelessFiring
from workers.stateless_engine.scheduler import BatchKey
from workers.stateless_engine.stepped_runs import Stepper
from workers.stateless_engine.thread import StatelessThread

Floats = npt.NDArray[np.float32]
SIZE: Final = 1000
"""Of a tensor: too large to ride in an event."""

BRANCHES: Final = Sequential(
    Parallel(
        Node("left", ["x"], [Edge("half", "join")]),
        Node("right", ["x"], [Edge("twice", "join"), Edge("twice", KEEP)]),
    ),
    Node(
        "join",
        ["half", "twice"],
        [Edge("joined", KEEP), Edge("joined", "say"), Edge("joined", CLIENT("image"))],
    ),
    Node("say", ["joined"], [Edge("said", KEEP), Edge("said", CLIENT("text"))]),
)
REFINE: Final = Loop(
    "refine",
    Sequential(
        Parallel(
            Node("pull", ["state"], [Edge("down", "mix")]),
            Node("push", ["state", "by"], [Edge("up", "mix")]),
        ),
        Node(
            "mix",
            ["down", "up"],
            [
                Edge("state", "pull"),
                Edge("state", "push"),
                Edge("state", KEEP),
                Edge("frame", CLIENT("image")),
            ],
        ),
    ),
    max_iters="rounds",
    outputs=["state"],
)
POLISH: Final = Loop(
    "polish",
    Sequential(
        Parallel(
            Node("pull", ["state"], [Edge("down", "mix")]),
            Node("push", ["state", "by"], [Edge("up", "mix")]),
        ),
        Node(
            "mix",
            ["down", "up"],
            [Edge("state", "pull"), Edge("state", "push"), Edge("state", KEEP), Edge("frame", KEEP)],
        ),
    ),
    max_iters="rounds",
    outputs=["state", "frame"],
    checkpoint=2,
)
POLICIES: Final[Mapping[str, ChunkPolicy]] = {
    "fixed": Fixed(3),
    "sliding": SlidingWindow(4, 2),
    "left": LeftContext(3, 1),
}
COUNT: Final = Loop(
    "count",
    Node(
        "counter",
        ["number"],
        [
            Edge("number", "counter"),
            *[StreamingEdge("numbers", f"take_{name}", policy) for name, policy in POLICIES.items()],
        ],
    ),
    max_iters="items",
)


def _take(name: str) -> Loop:
    return Loop(name, Node(f"take_{name}", [StreamInput("numbers")], [Edge("sum", CLIENT(name))]), None)


def _plan(request: PlanRequest) -> Plan:
    yield Walk("branches")
    return Finish(usage=Usage(), finish_reasons=())


GRAPH: Final = ModelGraph(
    family="mesh",
    nodes={
        "say": EngineKind.CPU,
        **dict.fromkeys(
            ("left", "right", "join", "pull", "push", "mix", "counter", *[f"take_{n}" for n in POLICIES]),
            EngineKind.STATELESS,
        ),
    },
    walks={
        "branches": compile_walk("branches", BRANCHES),
        "refine": compile_walk("refine", REFINE),
        "polish": compile_walk("polish", POLISH),
        "count": compile_walk("count", COUNT),
        **{name: compile_walk(name, _take(name)) for name in POLICIES},
    },
    plan=_plan,
    media={"image": {"height": 10}},
)
CONFIG: Final = DeploymentConfig(
    model="mesh",
    name="mesh-1",
    checkpoint="/nowhere",
    max_seq_len=128,
    node_groups=[
        NodeGroup(node_names=["left", "join", "pull", "mix", "counter"], ranks=[0]),
        NodeGroup(node_names=["right", "push", "say", *[f"take_{name}" for name in POLICIES]], ranks=[1]),
    ],
)


def floats(array: Array) -> Floats:
    """The numbers in an array; of a stream that ended without any, none."""
    if array.shape == (0,):
        return np.zeros(0, dtype=np.float32)
    assert array.dtype == "float32", array
    return array.data.view("<f4").reshape(array.shape)


def array(numbers: npt.ArrayLike) -> Array:
    """Numbers as an array."""
    cells: Floats = np.ascontiguousarray(numbers, dtype="<f4")
    return Array(dtype="float32", shape=cells.shape, data=cells.reshape(-1).view(np.uint8))


def handle(key: str, numbers: npt.ArrayLike) -> Handle:
    """Numbers that ride in their handle."""
    made = array(numbers)
    return Handle(key=key, dtype=made.dtype, shape=made.shape, data=made.data.tobytes())


def read(handle: Handle) -> Floats:
    """The numbers that ride in a handle."""
    assert handle.data is not None
    found: Floats = np.frombuffer(handle.data, "<f4").reshape(handle.shape)
    return found


@dataclass(slots=True)
class Arithmetic:
    """The nodes (`workers.stateless_engine.thread.NodeRunner`), and what they were given.

    Attributes:
        gates: by node: it waits in its thread until this is set.
        fired: every firing, by node.
        fails: nodes that fail.
    """

    nodes: Sequence[str]
    gates: dict[str, Event] = field(default_factory=dict)
    fired: dict[str, list[StatelessFiring]] = field(default_factory=dict)
    fails: set[str] = field(default_factory=set)

    @property
    def max_batch(self) -> Mapping[str, int]:
        return dict.fromkeys(self.nodes, 4)

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
        if (gate := self.gates.get(node)) is not None:
            gate.wait(20)
        self.fired.setdefault(node, []).extend(firings)
        if node in self.fails:
            return [WorkerError(f"{node} failed", code="node_failed") for _ in firings]
        return [self._run(node, firing) for firing in firings]

    def _run(self, node: str, firing: StatelessFiring) -> FiringResult:
        given = {name: floats(value) for name, value in firing.inputs.items() if isinstance(value, Array)}
        match node:
            case "left":
                return FiringResult(outputs={"half": array(given["x"] / 2)}, facts={"left": 1})
            case "right":
                return FiringResult(outputs={"twice": array(given["x"] * 2)}, facts={"right": 1})
            case "join":
                return FiringResult(outputs={"joined": array(given["half"] + given["twice"])})
            case "pull":
                return FiringResult(outputs={"down": array(given["state"] - 1)})
            case "push":
                return FiringResult(outputs={"up": array(given["state"] + given["by"])})
            case "mix":
                state = given["down"] + given["up"]
                stops = (
                    (firing.args.get("loop", "refine"),) if state[0] > firing.args.get("until", 1e30) else ()
                )
                return FiringResult(outputs={"state": array(state), "frame": array(state[:2])}, stops=stops)
            case "counter":
                number = given["number"] + 1
                wide = np.full(firing.args.get("width", 1), number[0])
                return FiringResult(outputs={"number": array(number), "numbers": array(wide)})
            case _:
                chunk = firing.chunk
                assert chunk is not None
                items = given["numbers"]
                told = [chunk.number, chunk.fresh, chunk.last, items.sum(), items.shape[0]]
                is_enough = chunk.number + 1 == firing.args.get("enough")
                stops = (node.removeprefix("take_"),) if is_enough else ()
                return FiringResult(outputs={"sum": array(told)}, stops=stops)


class MeshProcessing:
    """The CPU face."""

    eos_ids = ()
    tool_calls = ""

    def run(self, node: str, key: str, inputs: Mapping[str, Handle], args: Mapping[str, Any]) -> CpuResult:
        assert node == "say"
        text = f"sum {read(inputs['joined']).sum():g}".encode()
        said = Handle(key=f"{key}/said", dtype="uint8", shape=(len(text),), data=text)
        return CpuResult(outputs={"said": said}, facts={"said": len(text)})

    def text_decoder(self) -> TextDecoder:
        return ByteDecoder()


@dataclass(slots=True)
class MeshModel:
    """What a rank hosts of it."""

    rank: int
    progress: float = 1.0
    nodes: Arithmetic = field(init=False)
    _thread: StatelessThread | None = None

    def __post_init__(self) -> None:
        # All of them, whatever is configured: a test may place a request otherwise.
        self.nodes = Arithmetic([n for n, kind in GRAPH.nodes.items() if kind is EngineKind.STATELESS])

    def counters(self) -> EngineStats | None:
        return None

    def encoder_caches(self) -> EncoderMeters:
        return EncoderMeters()

    def stepped_nodes(self) -> dict[str, StepMeters]:
        return {}

    async def load(self, rows: EngineClient) -> Loaded:
        del rows
        self._thread = StatelessThread(lambda: self.nodes)
        await self._thread.start()
        return Loaded(graph=GRAPH, processing=MeshProcessing(), engine=None, stateless=self._thread)

    async def wait(self) -> None:
        assert self._thread is not None
        await self._thread.wait()

    async def close(self) -> None:
        for gate in self.nodes.gates.values():
            gate.set()
        if self._thread is not None:
            await self._thread.close()
