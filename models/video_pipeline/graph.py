"""Graph of pipelines that make videos and are served in parts (`models.diffusion_pipelines.graph`)."""

from typing import Final

from models.base import ModelGraph
from models.checkpoints.claims import CheckpointInfo, Claim
from models.diffusion_pipelines.classes import KNOWN
from models.diffusion_pipelines.graph import VIDEO, class_name, parts_graph
from models.diffusion_pipelines.options import VideoOptions


def claims(checkpoint: CheckpointInfo) -> Claim | None:
    """Claim the known classes that make videos alone."""
    kind = KNOWN.get(class_name(checkpoint))
    return Claim.ARCHITECTURE if kind is not None and kind.makes == (VIDEO,) else None


GRAPH: Final[ModelGraph] = parts_graph(
    "video_pipeline",
    claims,
    outputs=(VIDEO,),
    options=VideoOptions,
    serves="videos by diffusers: Wan2.1, Wan2.2, LTX",
)
