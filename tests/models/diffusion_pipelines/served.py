"""Tiny pipelines as they are served, node by node, and as diffusers itself runs them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from PIL import Image

from models.base import Item, StatelessResult
from models.diffusion_pipelines import nodes
from models.diffusion_pipelines.calls import needs_picture, parameters_of
from models.diffusion_pipelines.denoiser import Denoiser
from models.diffusion_pipelines.packing import pack
from models.diffusion_pipelines.text_encoder import TextEncoder
from models.diffusion_pipelines.vae_decoder import VaeDecoder
from models.programs import Going
from models.stepped import Call, Run, SteppedNode
from tests.tiny.diffusion import CALLS, pipeline_class, tiny_pipeline

NO_PROGRESS: Final = lambda *_: None  # noqa: E731


@dataclass(frozen=True)
class Ask:
    """A request of a pipeline; `pictures` is the number of its input images."""

    prompt: str = "a red cat"
    seed: int = 1
    call: Mapping[str, Any] | None = None
    further: Mapping[str, Any] | None = None
    pictures: int = 0


@cache
def loaded(name: str, node: str) -> Any:
    """A node of a tiny pipeline."""
    with torch.inference_mode():
        return nodes.load(
            tiny_pipeline(name), node, device="cpu", dtype="auto", progress=NO_PROGRESS, kwargs={}
        )


@cache
def picture(seed: int = 0) -> np.ndarray[Any, Any]:
    return (np.random.RandomState(seed).rand(64, 64, 3) * 255).astype("uint8")


def kind_of(name: str) -> Any:
    """The class of a tiny pipeline."""
    import diffusers  # noqa: PLC0415

    return getattr(diffusers, pipeline_class(tiny_pipeline(name)))


def item_of(name: str, ask: Ask, **inputs: torch.Tensor) -> Item:
    """The item of a node's execution for a request."""
    if count := ask.pictures or needs_picture(kind_of(name)):
        inputs["pictures"] = pack({str(one): torch.from_numpy(picture(one)) for one in range(count)})
    args = {
        "call": {**CALLS[name], **(ask.call or {})},
        "prompt": ask.prompt,
        "negative_prompt": "",
        **(ask.further or {}),
    }
    return Item(inputs=inputs, args=args, seed=ask.seed)


def started(name: str, ask: Ask, state: Mapping[str, torch.Tensor] | None = None) -> Run:
    """The run of a request in the denoiser, after its text has been encoded."""
    encoder: TextEncoder = loaded(name, "text_encoder")
    denoiser: Denoiser = loaded(name, "denoiser")
    (encoded,) = encoder.run([item_of(name, ask)])
    assert isinstance(encoded, StatelessResult)
    return denoiser.start(item_of(name, ask, condition=encoded.outputs["condition"]), state or {})


@dataclass
class Driven:
    """The end of runs, and what was seen on the way."""

    results: list[StatelessResult]
    reports: list[list[Going]]
    forwards: int
    widest: int
    modules: set[str]


def drive(node: SteppedNode, runs: Sequence[Run]) -> Driven:
    """Run all to their ends, the calls of equal groups together, as the engine does."""
    reached: list[Call | StatelessResult] = [run.begin() for run in runs]
    seen = Driven([], [[] for _ in runs], 0, 0, set())
    while waiting := [index for index, one in enumerate(reached) if isinstance(one, Call)]:
        groups: dict[Any, list[int]] = {}
        for index in waiting:
            call = reached[index]
            assert isinstance(call, Call)
            groups.setdefault(call.group, []).append(index)
            if call.inputs is not None:
                seen.modules.add(call.inputs[0])
            if call.report is not None:
                seen.reports[index].append(call.report)
        for members in groups.values():
            answers = node.compute([one for index in members if isinstance(one := reached[index], Call)])
            seen.forwards += 1
            seen.widest = max(seen.widest, len(members))
            for index, answer in zip(members, answers, strict=True):
                reached[index] = runs[index].take(answer)
    for run in runs:
        run.close()
    seen.results = [one for one in reached if isinstance(one, StatelessResult)]
    return seen


def decoded(name: str, result: StatelessResult) -> np.ndarray[Any, Any]:
    """The frames of a denoiser's result, (T, H, W, 3)."""
    decoder: VaeDecoder = loaded(name, "vae_decoder")
    (made,) = decoder.run([Item(inputs=result.outputs, args={})])
    assert isinstance(made, StatelessResult)
    frames: np.ndarray[Any, Any] = made.outputs["frames"].numpy()
    return frames


@torch.inference_mode()
def served(name: str, asks: Sequence[Ask]) -> tuple[list[np.ndarray[Any, Any]], Driven]:
    """The frames of requests that are computed together."""
    driven = drive(loaded(name, "denoiser"), [started(name, ask) for ask in asks])
    return [decoded(name, one) for one in driven.results], driven


@cache
def oracle(name: str) -> Any:
    """A tiny pipeline as diffusers loads it."""
    pipeline = kind_of(name).from_pretrained(tiny_pipeline(name))
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def by_diffusers(name: str, ask: Ask) -> np.ndarray[Any, Any]:
    """The frames of a request by diffusers' own call, with the same generator."""
    pipeline = oracle(name)
    arguments: dict[str, Any] = {"prompt": ask.prompt, **CALLS[name], **(ask.call or {})}
    if "negative_prompt" in parameters_of(type(pipeline)):
        arguments["negative_prompt"] = ""
    if count := ask.pictures or needs_picture(type(pipeline)):
        pictures = [Image.fromarray(picture(one)) for one in range(count)]
        arguments["image"] = pictures[0] if count == 1 else pictures
    generator = torch.Generator().manual_seed(ask.seed)
    output = pipeline(**arguments, generator=generator, output_type="np")
    for attribute in ("images", "frames", "video"):
        found = getattr(output, attribute, None)
        if found is not None:
            shown = np.asarray(found[0] if attribute == "frames" else found)
            return (shown * 255).round().astype("uint8")
    raise AssertionError(f"{type(output).__name__} has no pictures")


def difference(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> int:
    """The largest difference of two pictures, of 255."""
    assert one.shape == other.shape
    return int(np.abs(one.astype(int) - other.astype(int)).max())


def folder(name: str) -> Path:
    return tiny_pipeline(name)
