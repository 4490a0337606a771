"""Graph of pipelines of videos that run as one node (`models.diffusion_pipelines.graph`)."""

from typing import Final

from models.base import ModelGraph
from models.checkpoints.claims import CheckpointInfo, Claim
from models.diffusion_pipelines.folder import makes_videos
from models.diffusion_pipelines.graph import VIDEO, class_name, whole_graph
from models.diffusion_pipelines.options import VideoOptions


def claims(checkpoint: CheckpointInfo) -> Claim | None:
    """Claim every class whose name says that it makes videos; families that know the class claim more."""
    return Claim.GENERIC if makes_videos(class_name(checkpoint)) else None


GRAPH: Final[ModelGraph] = whole_graph(
    "whole_video_pipeline",
    claims,
    outputs=(VIDEO,),
    options=VideoOptions,
    serves="videos by any other pipeline of diffusers, as one node",
)
