"""Speech of a tiny CSM by its own plan, on workers in one process, and what transformers says."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from configs.deployment import DeploymentConfig
from configs.placement import NodeGroup
from models.csm import processing
from models.csm.graph import CONTEXT_FRAMES, GRAPH
from shared.events import Inputs, Limits, Params, WalkResult
from shared.plans import Chain, PlanRequest, Start, StepResult, Walk
from shared.tensors import read_ids
from tests.tiny import csm
from tests.workers.cluster import Cluster, clustered
from workers import settings
from workers.data_plane.port import TensorStore
from workers.loading.model import LocalModel

FRAMES: Final = 20
SAMPLES: Final = 1920
"""Of a frame."""
TOGETHER: Final = {"prepare": 0, "LLM": 0, "codec_decoder": 0}
APART: Final = {"prepare": 0, "LLM": 0, "codec_decoder": 1}


@cache
def prepares() -> processing.CsmProcessing:
    """The CPU node, loaded once."""
    return processing.load(csm.tiny_csm(), max_seq_len=256)


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

    def prompt(self) -> list[int]:
        """The token ids."""
        walk = next(GRAPH.plan(self.request()))
        assert isinstance(walk, Walk)
        return list(read_ids(prepares().run("prepare", "k", {}, walk.call().args).handle("token_ids")))


@asynccontextmanager
async def serving(ranks: Sequence[int] = (0,)) -> AsyncIterator[Cluster]:
    """Workers, each with all nodes."""
    config = DeploymentConfig(
        model="csm",
        name="csm",
        checkpoint=str(csm.tiny_csm()),
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


def sound_of(codes: torch.Tensor, chunks: Sequence[int]) -> npt.NDArray[np.int16]:
    """The sound of frames, (frames, groups), decoded by transformers in chunks of so many."""
    found, end = [], 0
    for count in chunks:
        begin, end = end, end + count
        given = codes[max(0, begin - CONTEXT_FRAMES) : end]
        with torch.inference_mode():
            wave = csm.oracle().codec_model.decode(given.T[None]).audio_values[0, 0]
        found.append((wave[-count * SAMPLES :].clamp(-1, 1) * 32767).to(torch.int16).numpy())
    return np.concatenate(found)
