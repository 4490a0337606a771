"""Graph of Wan2.2 under M*'s names of nodes, for its placements (`models.diffusion_pipelines.graph`)."""

from typing import Final

from models.base import ModelGraph
from models.diffusion_pipelines.graph import VIDEO, NodeNames, parts_graph
from models.diffusion_pipelines.options import VideoOptions

GRAPH: Final[ModelGraph] = parts_graph(
    "wan22",
    None,
    outputs=(VIDEO,),
    options=VideoOptions,
    names=NodeNames(denoiser="dit", former=("vae_encoder",)),
    repository="Wan-AI/Wan2.2-TI2V-5B-Diffusers",
    serves="Wan2.2, by a configuration that names it",
)
