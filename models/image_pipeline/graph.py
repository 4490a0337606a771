"""Graph of pipelines that draw images and are served in parts (`models.diffusion_pipelines.graph`)."""

from typing import Final

from models.base import ModelGraph
from models.checkpoints.claims import CheckpointInfo, Claim
from models.diffusion_pipelines.classes import KNOWN
from models.diffusion_pipelines.graph import IMAGE, class_name, parts_graph
from models.diffusion_pipelines.options import ImageOptions


def claims(checkpoint: CheckpointInfo) -> Claim | None:
    """Claim the known classes that make images alone."""
    kind = KNOWN.get(class_name(checkpoint))
    return Claim.ARCHITECTURE if kind is not None and kind.makes == (IMAGE,) else None


GRAPH: Final[ModelGraph] = parts_graph(
    "image_pipeline",
    claims,
    outputs=(IMAGE,),
    options=ImageOptions,
    serves="images by diffusers: Z-Image, Qwen-Image, Flux.1, Flux.2-klein, SD3, SDXL",
)
