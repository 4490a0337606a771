"""The arguments of a pipeline's `__call__` for one request, made of the walk's arguments and its pictures."""

import inspect
from collections.abc import Mapping
from typing import Any, Final

import torch
from PIL import Image

from models.base import Item
from models.diffusion_pipelines.packing import unpack

PICTURES: Final = "pictures"
_MAX_SEED: Final = 2**63


def parameters_of(pipeline_class: type) -> frozenset[str]:
    """The names of the parameters of a class's `__call__`."""
    call: Any = pipeline_class.__call__
    return frozenset(inspect.signature(call).parameters) - {"self"}


def takes_pictures(pipeline_class: type) -> bool:
    """True for a class that takes an input image."""
    return "image" in parameters_of(pipeline_class)


def needs_picture(pipeline_class: type) -> bool:
    """True for a class that cannot do without an input image, as its name says."""
    return takes_pictures(pipeline_class) and any(
        part in pipeline_class.__name__
        for part in ("ImageToVideo", "Img2Img", "Image2Image", "Edit", "Inpaint")
    )


def call_arguments(item: Item, pipeline_class: type) -> dict[str, Any]:
    """The arguments of `__call__`: prompt, generator, pictures, and what the request has set."""
    args = item.args
    taken = parameters_of(pipeline_class)
    made: dict[str, Any] = {"prompt": args.get("prompt") or "", **args["call"]}
    if "negative_prompt" in taken and args.get("negative_prompt") is not None:
        made["negative_prompt"] = args["negative_prompt"]
    pictures = pictures_of(item.inputs)
    if pictures and "image" in taken:
        made["image"] = pictures[0] if len(pictures) == 1 else pictures
    if "generator" in taken:
        made["generator"] = generator_of(item)
    return made


def generator_of(item: Item) -> torch.Generator:
    """The generator of a request's noise, on the CPU: the same on every device."""
    return torch.Generator("cpu").manual_seed(int(item.args.get("seed", item.seed)) % _MAX_SEED)


def pictures_of(inputs: Mapping[str, torch.Tensor]) -> list[Image.Image]:
    """The input images of a request, in order; none without the edge."""
    packed = inputs.get(PICTURES)
    if packed is None or not packed.numel():
        return []
    found = unpack(packed)
    return [Image.fromarray(found[name].numpy()) for name in sorted(found, key=int)]
