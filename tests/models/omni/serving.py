"""Answers of tiny models that think and talk by their own plans, on workers in one process."""

import hashlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from transformers import AutoImageProcessor, WhisperFeatureExtractor

from configs.deployment import DeploymentConfig
from configs.placement import NodeGroup
from models import registry
from models.base import CpuResult, ModelGraph
from models.media.kinds import ChooseFrames, Video, VideoInfo
from models.omni.processing import OmniProcessing
from shared.events import Inputs, Limits, Media, Params, WalkResult
from shared.plans import Chain, PlanRequest, Start, StepResult, Walk
from shared.tensors import Handle
from tests.models.vision_language.axes_oracle import planes_of
from tests.tiny.vision_axes import AxesFamily
from tests.workers.cluster import Cluster, clustered
from workers import settings
from workers.data_plane.port import TensorStore
from workers.loading.model import LocalModel

Array = npt.NDArray[Any]

TOKENS: Final = 8
FPS: Final = 4.0
SEED: Final = 3
NODES: Final = ("prepare", "vision_encoder", "audio_encoder", "Thinker", "Talker", "Code2Wav")


class Shelf:
    """A reader of media that are arrays already: images (3 axes), videos (4), sounds at 16 kHz (1)."""

    def __init__(self) -> None:
        self._media: dict[str, Array] = {}
        self.tracks: dict[str, Array] = {}

    def put(self, one: Array) -> Media:
        """Keep a medium; it as a file of a request."""
        digest = hashlib.sha256(one.tobytes()).hexdigest()
        self._media[digest] = one
        return Media(modality={1: "audio", 3: "image", 4: "video"}[one.ndim], digest=digest)

    def image(self, medium: Media) -> Array:
        return self._media[medium.digest]

    def audio(self, medium: Media, *, rate: int) -> Array:
        assert rate == 16_000
        found = self._media[medium.digest]
        return self.tracks[medium.digest] if found.ndim == 4 else found

    def audio_blocks(self, medium: Media, *, rate: int, take: Callable[[Array], None]) -> None:
        take(self.audio(medium, rate=rate))

    def audio_span(self, medium: Media, *, rate: int, first: int, count: int) -> Array:
        return self.audio(medium, rate=rate)[first : first + count]

    def tensors(self, medium: Media) -> Mapping[str, Array]:
        raise AssertionError(medium)

    def video(self, medium: Media, *, choose: ChooseFrames) -> Video:
        frames = self._media[medium.digest]
        count, height, width, _ = frames.shape
        info = VideoInfo(frames=count, fps=FPS, seconds=count / FPS, width=width, height=height)
        indices = tuple(choose(info))
        return Video(
            frames=frames[list(indices)], seconds=np.array(indices) / FPS, indices=indices, info=info
        )


SHELF: Final = Shelf()


@dataclass(frozen=True, eq=False)
class Asked:
    """A request: its media come before its text, in one user's turn after a system's. Equal to itself alone.

    Attributes:
        track: the sound track of its video, which is to be heard.
        fps: the frames to take of each second of its videos.
    """

    text: str
    media: tuple[Array, ...] = ()
    voice: str = "Ethan"
    frames: int = 12
    outputs: tuple[str, ...] = ("text", "audio")
    penalty: float = 1.0
    track: Array | None = None
    fps: float = 2.0

    def request(self, *, tokens: int = TOKENS, concurrent: int = 1, **options: Any) -> PlanRequest:
        """As a plan gets it, while so many requests run."""
        files = [SHELF.put(one) for one in self.media]
        if self.track is not None:
            SHELF.tracks |= {one.digest: self.track for one in files if one.modality == "video"}
            options = {"use_audio_in_video": True, **options}
        content: list[dict[str, Any]] = [
            {"type": medium.modality, "file": number} for number, medium in enumerate(files)
        ]
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [*content, {"type": "text", "text": self.text}]},
        ]
        return PlanRequest(
            request_id="r",
            inputs=Inputs(messages=messages, files=files, output_modalities=[*self.outputs]),
            params=Params(
                max_tokens=tokens,
                temperature=0.0,
                voice=self.voice,
                options={
                    "fps": self.fps,
                    "talker_temperature": 0.0,
                    "talker_max_output_tokens": self.frames,
                    "talker_repetition_penalty": self.penalty,
                    **options,
                },
            ),
            limits=Limits(max_seq_len=512, kv_tokens=512, default_max_tokens=64, concurrent=concurrent),
            seed=SEED,
        )


@dataclass(frozen=True)
class Served:
    """A tiny checkpoint, and its family.

    Attributes:
        hears: the arguments that its processor gives to the feature extractor.
        frames: the family whose frames are of equal size.
    """

    graph: ModelGraph
    folder: Path
    hears: Mapping[str, Any]
    frames: AxesFamily

    @cached_property
    def prepares(self) -> OmniProcessing:
        """The CPU node, loaded once."""
        found = registry.load_processing(self.graph.family, self.folder, max_seq_len=512, media=SHELF)
        assert isinstance(found, OmniProcessing)
        return found

    @asynccontextmanager
    async def serving(self, ranks: Sequence[int] = (0,)) -> AsyncIterator[Cluster]:
        """Workers, each with all nodes."""
        config = DeploymentConfig(
            model=self.graph.family,
            name="omni",
            checkpoint=str(self.folder),
            max_seq_len=512,
            kv_tokens=1024,
            node_groups=[NodeGroup(node_names=[*NODES], ranks=[*ranks])],
            model_kwargs={"device": "cpu", "dtype": "float32", "max_sequences": 8},
        )

        def model(rank: int, store: TensorStore) -> LocalModel:
            return LocalModel(config, settings.of(config), rank, store.allocate)

        async with clustered(self.graph, config, model, ranks) as cluster:
            yield cluster

    def order(
        self,
        cluster: Cluster,
        name: str,
        asked: Asked,
        layout: Mapping[str, int],
        *,
        attempt: int = 1,
        **options: Any,
    ) -> int:
        """Order all that the plan orders; return the number of orders, one for each rank of a step."""
        request = asked.request(**options)
        plan = self.graph.plan(request)
        first = next(plan)
        assert isinstance(first, Walk)
        plan_step: Any = plan.send(self._prepared(first))
        steps = orders = 0
        sub: Any
        while True:
            sub, partition = (
                (next(plan_step.plan), plan_step.name) if isinstance(plan_step, Start) else (plan_step, "")
            )
            steps += 1
            walks = sub.walks if isinstance(sub, Chain) else (sub,)
            ends = sub.ends if isinstance(sub, Chain) else ()
            orders += len(
                cluster.order(
                    name,
                    *(walk.call() for walk in walks),
                    step=steps,
                    attempt=attempt,
                    ends=ends,
                    partition=partition,
                    ranks=layout,
                )
            )
            if not partition:
                return orders
            plan_step = plan.send(None)

    def _prepared(self, walk: Walk) -> StepResult:
        """The result of `prepare`, whose arrays are in its handles."""
        result = self.prepares.run("prepare", "k", {}, walk.call().args)
        outputs = {name: _inline(name, one) for name, one in result.outputs.items()}
        return StepResult(walks=(WalkResult(name=walk.name, facts=dict(result.facts), outputs=outputs),))

    def prompt_of(self, asked: Asked) -> CpuResult:
        """The result of `prepare`."""
        walk = next(self.graph.plan(asked.request()))
        assert isinstance(walk, Walk)
        return self.prepares.run("prepare", "k", {}, walk.call().args)

    def given(self, asked: Asked) -> dict[str, Any]:
        """What transformers' model gets of the media, by its own image processor and feature extractor."""
        folder = str(self.folder)
        images = [Image.fromarray(one) for one in asked.media if one.ndim == 3]
        heard = [asked.track if one.ndim == 4 else one for one in asked.media]
        sounds = [one for one in heard if one is not None and one.ndim == 1]
        films = [one for one in asked.media if one.ndim == 4]
        found: dict[str, torch.Tensor] = {}
        if images:
            seen = AutoImageProcessor.from_pretrained(folder, backend="pil")(
                images=images, return_tensors="pt"
            )
            found |= {"pixel_values": seen["pixel_values"], "image_grid_thw": seen["image_grid_thw"]}
        if films:
            cells = AutoImageProcessor.from_pretrained(folder, backend="pil")
            taken = int(FPS / asked.fps)  # planes of two frames
            planes = [planes_of(cells, one[::taken], self.frames) for one in films]
            found |= {
                "pixel_values_videos": torch.cat([pixels for pixels, _ in planes]),
                "video_grid_thw": torch.tensor([grid for _, grid in planes]),
                "video_second_per_grid": torch.full((len(films),), 2 / asked.fps),
            }
        if sounds:
            features = WhisperFeatureExtractor.from_pretrained(folder)(
                sounds,
                sampling_rate=16_000,
                return_attention_mask=True,
                return_tensors="pt",
                **self.hears,
            )
            found |= {
                "input_features": features["input_features"],
                "feature_attention_mask": features["attention_mask"],
            }
        return found if asked.track is None else {**found, "use_audio_in_video": True}

    def text_of(self, token_ids: Sequence[int]) -> str:
        """The text of tokens."""
        decoder = self.prepares.text_decoder()
        ends = self.prepares.eos_ids
        return "".join(decoder.push(one) for one in token_ids if one not in ends) + decoder.flush()


def _inline(name: str, one: Any) -> Handle:
    if isinstance(one, Handle):
        return one
    return Handle(key=f"k/{name}", dtype=str(one.dtype), shape=one.shape, data=one.tobytes())


def released(cluster: Cluster, name: str, modality: str) -> bytes:
    """The released values of a modality: later attempts go on after them."""
    chunks = [chunk for chunk in cluster.chunks(name) if chunk.modality == modality]
    by_index = {(chunk.track, chunk.index): chunk for chunk in chunks}
    return b"".join(chunk.data or chunk.text.encode() for chunk in by_index.values())
