"""Graph of pipelines of images that run as one node (`models.diffusion_pipelines.graph`)."""

from typing import Final

from models.base import ModelGraph
from models.checkpoints.claims import CheckpointInfo, Claim
from models.diffusion_pipelines.folder import makes_videos
from models.diffusion_pipelines.graph import IMAGE, class_name, whole_graph
from models.diffusion_pipelines.options import ImageOptions


def claims(checkpoint: CheckpointInfo) -> Claim | None:
    """Claim every other folder with a `model_index.json`; families that know the class claim more."""
    name = class_name(checkpoint)
    return Claim.GENERIC if name and not makes_videos(name) else None


GRAPH: Final[ModelGraph] = whole_graph(
    "whole_pipeline",
    claims,
    outputs=(IMAGE,),
    options=ImageOptions,
    serves="images by any other pipeline of diffusers, as one node",
)
