"""Graph of Cosmos3, under M*'s names of nodes (`models.diffusion_pipelines.graph`)."""

from typing import Final

from models.base import ModelGraph
from models.checkpoints.claims import CheckpointInfo, Claim
from models.diffusion_pipelines.graph import IMAGE, VIDEO, NodeNames, class_name, parts_graph
from models.diffusion_pipelines.options import CosmosOptions


def claims(checkpoint: CheckpointInfo) -> Claim | None:
    """Claim the class of Cosmos3."""
    return Claim.ARCHITECTURE if class_name(checkpoint) == "Cosmos3OmniPipeline" else None


GRAPH: Final[ModelGraph] = parts_graph(
    "cosmos3",
    claims,
    outputs=(VIDEO, IMAGE),
    options=CosmosOptions,
    names=NodeNames(text_encoder="", denoiser="dit", former=("vae_encoder", "audio_decoder")),
    repository="nvidia/Cosmos3-Nano",
    serves="Cosmos3: videos and images",
)
