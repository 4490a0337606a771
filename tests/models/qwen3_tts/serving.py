"""Speech of a tiny Qwen3-TTS by its own plan, on workers in one process, and what was recorded."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from configs.deployment import DeploymentConfig
from configs.placement import NodeGroup
from models.qwen3_tts import processing
from models.qwen3_tts.graph import GRAPH
from shared.events import Inputs, Limits, Params, WalkResult
from shared.plans import Chain, PlanRequest, Start, StepResult
from tests.models.qwen3_tts.cases import CASES, FRAMES, PUBLISHED
from tests.tiny import qwen3_tts
from tests.workers.cluster import Cluster, clustered
from workers import settings
from workers.data_plane.port import TensorStore
from workers.loading.model import LocalModel

SAMPLES: Final = 1920
"""Of a frame."""
TOGETHER: Final = {"prepare": 0, "Talker": 0, "Codec": 0}
APART: Final = {"prepare": 0, "Talker": 0, "Codec": 1}


@cache
def prepares() -> processing.Qwen3TtsProcessing:
    """The CPU node, loaded once."""
    return processing.load(qwen3_tts.tiny_qwen3_tts(), max_seq_len=256)


@dataclass(frozen=True)
class Asked:
    """A request."""

    text: str
    voice: str | None = None
    params: Mapping[str, Any] = field(default_factory=lambda: {"temperature": 0.0})
    options: Mapping[str, Any] = field(default_factory=dict)

    def request(self, *, frames: int | None = FRAMES, concurrent: int = 1) -> PlanRequest:
        """As a plan gets it, while so many requests run."""
        return PlanRequest(
            request_id="r",
            inputs=Inputs(text=self.text, output_modalities=["audio"]),
            params=Params(max_tokens=frames, voice=self.voice, options={**self.options}, **self.params),
            limits=Limits(max_seq_len=256, kv_tokens=256, default_max_tokens=200, concurrent=concurrent),
            seed=3,
        )

    @classmethod
    def case(cls, name: str, **options: Any) -> Self:
        """A recorded case."""
        case = {key: value for key, value in CASES[name].items() if key not in ("text", "speaker")}
        return cls(CASES[name]["text"], CASES[name]["speaker"], options={**case, **options})


@asynccontextmanager
async def serving(ranks: Sequence[int] = (0,)) -> AsyncIterator[Cluster]:
    """Workers, each with all nodes."""
    config = DeploymentConfig(
        model="qwen3_tts",
        name="qwen3_tts",
        checkpoint=str(qwen3_tts.tiny_qwen3_tts()),
        max_seq_len=256,
        kv_tokens=1024,
        node_groups=[NodeGroup(node_names=[*TOGETHER], ranks=[*ranks])],
        model_kwargs={"device": "cpu", "dtype": "float32", "max_sequences": 8},
    )

    def model(rank: int, store: TensorStore) -> LocalModel:
        return LocalModel(config, settings.of(config), rank, store.allocate)

    async with clustered(GRAPH, config, model, ranks) as cluster:
        yield cluster


def order(
    cluster: Cluster, name: str, asked: Asked, layout: Mapping[str, int], *, attempt: int = 1, **how: Any
) -> int:
    """Order all that the plan orders; the number of orders, one for each rank of a step."""
    plan: Any = GRAPH.plan(asked.request(**how))
    first = next(plan)
    result = prepares().run("prepare", "k", {}, first.call().args)
    plan_step = plan.send(
        StepResult(
            walks=(
                WalkResult(
                    name=first.name,
                    facts=dict(result.facts),
                    outputs={"token_ids": result.handle("token_ids")},
                ),
            )
        )
    )
    steps = orders = 0
    while True:
        started = isinstance(plan_step, Start)
        sub = next(plan_step.plan) if started else plan_step
        steps += 1
        chained = isinstance(sub, Chain)
        orders += len(
            cluster.order(
                name,
                *(walk.call() for walk in (sub.walks if chained else (sub,))),
                step=steps,
                attempt=attempt,
                ends=sub.ends if chained else (),
                partition=plan_step.name if started else "",
                ranks=layout,
            )
        )
        if not started:
            return orders
        plan_step = plan.send(None)


def released(cluster: Cluster, name: str) -> npt.NDArray[np.int16]:
    """The released samples: later attempts go on after them."""
    by_index = {chunk.index: chunk.data or b"" for chunk in cluster.chunks(name) if chunk.modality == "audio"}
    return np.frombuffer(b"".join(by_index.values()), "<i2")


def frames_of(cluster: Cluster, name: str) -> list[int]:
    """The frames of each chunk of sound."""
    sizes = [len(chunk.data or b"") for chunk in cluster.chunks(name) if chunk.modality == "audio"]
    return [size // (2 * SAMPLES) for size in sizes if size]


def recorded(name: str) -> npt.NDArray[np.int32]:
    """What the published code says, `NAME.codes` (frames, groups), or its `sound`, eight frames at a time."""
    with np.load(PUBLISHED, allow_pickle=False) as found:
        made: npt.NDArray[np.int32] = found[name]
        return made
