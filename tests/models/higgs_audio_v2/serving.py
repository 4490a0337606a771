"""Speech of a tiny Higgs Audio v2 by its own plan, on workers in one process."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from configs.deployment import DeploymentConfig
from configs.placement import NodeGroup
from models.higgs_audio_v2 import processing
from models.higgs_audio_v2.graph import GRAPH
from shared.events import Inputs, Limits, Params, WalkResult
from shared.plans import PlanRequest, StepResult, Walk
from shared.tensors import read_ids
from tests.tiny import higgs_audio
from tests.workers.cluster import Cluster, clustered
from workers import settings
from workers.data_plane.port import TensorStore
from workers.loading.model import LocalModel

STEPS: Final = 60
TOGETHER: Final = {"prepare": 0, "LLM": 0, "codec_decoder": 0}
APART: Final = {"prepare": 0, "LLM": 0, "codec_decoder": 1}


@cache
def prepares() -> processing.HiggsAudioProcessing:
    """The CPU node, loaded once."""
    return processing.load(higgs_audio.tiny_higgs_audio(), max_seq_len=512)


@dataclass(frozen=True)
class Asked:
    """A request; greedy unless it says otherwise."""

    text: str
    params: Mapping[str, Any] = field(default_factory=lambda: {"temperature": 0.0})
    options: Mapping[str, Any] = field(default_factory=dict)
    voice: str | None = None
    seed: int = 3

    def request(self, *, steps: int | None = STEPS, **limits: Any) -> PlanRequest:
        """As a plan gets it."""
        room: dict[str, Any] = {
            "max_seq_len": 512,
            "kv_tokens": 2048,
            "default_max_tokens": 200,
            "concurrent": 1,
        }
        return PlanRequest(
            request_id="r",
            inputs=Inputs(text=self.text, output_modalities=["audio"]),
            params=Params(
                **{"max_tokens": steps, "voice": self.voice, "options": {**self.options}, **self.params}
            ),
            limits=Limits(**{**room, **limits}),
            seed=self.seed,
        )


def prompt_of(asked: Asked) -> list[int]:
    """The tokens of the prompt."""
    plan: Any = GRAPH.plan(asked.request())
    found = prepares().run("prepare", "k", {}, next(plan).call().args)
    return read_ids(found.handle("token_ids"))


def walks(asked: Asked, **how: Any) -> Walk:
    """The walk that speaks, behind the one that prepares."""
    plan: Any = GRAPH.plan(asked.request(**how))
    first = next(plan)
    found = prepares().run("prepare", "k", {}, first.call().args)
    outputs = {"token_ids": found.handle("token_ids")}
    done = WalkResult(name=first.name, facts=dict(found.facts), outputs=outputs)
    walk: Walk = plan.send(StepResult(walks=(done,)))
    return walk


@asynccontextmanager
async def serving(ranks: Sequence[int] = (0,)) -> AsyncIterator[Cluster]:
    """Workers, each with all nodes."""
    config = DeploymentConfig(
        model="higgs_audio_v2",
        name="higgs",
        checkpoint=str(higgs_audio.tiny_higgs_audio()),
        max_seq_len=512,
        kv_tokens=2048,
        node_groups=[NodeGroup(node_names=[*TOGETHER], ranks=[*ranks])],
        model_kwargs={"device": "cpu", "dtype": "float32", "max_sequences": 8},
    )

    def model(rank: int, store: TensorStore) -> LocalModel:
        return LocalModel(config, settings.of(config), rank, store.allocate)

    async with clustered(GRAPH, config, model, ranks) as cluster:
        yield cluster


def order(
    cluster: Cluster,
    name: str,
    asked: Asked,
    layout: Mapping[str, int] = TOGETHER,
    *,
    attempt: int = 1,
    **how: Any,
) -> int:
    """Order what the plan orders; the number of orders, one for each rank."""
    walk = walks(asked, **how)
    orders = cluster.order(name, walk.call(), step=1, attempt=attempt, ranks=layout, seed=asked.seed)
    return len(orders)


def released(cluster: Cluster, name: str) -> npt.NDArray[np.int16]:
    """The released samples: later attempts go on after them."""
    by_index = {chunk.index: chunk.data or b"" for chunk in cluster.chunks(name) if chunk.modality == "audio"}
    return np.frombuffer(b"".join(by_index.values()), "<i2")


def frames_of(cluster: Cluster, name: str) -> list[int]:
    """The frames of each chunk of sound."""
    sizes = [len(chunk.data or b"") for chunk in cluster.chunks(name) if chunk.modality == "audio"]
    return [size // (2 * higgs_audio.HOP) for size in sizes if size]
