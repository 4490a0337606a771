"""Graph and plan of image-text encoders.

    embed    texts and images -> token ids and pixels -> an embedding of each

The CPU node is `prepare`; the node `encoder` has both towers, and packs the texts and images of all waiting
requests.
"""

from typing import Final

import msgspec

from models.base import EMBEDDING, TEXT, EngineKind, ModelGraph
from models.checkpoints.claims import CheckpointInfo, Claim
from models.text_encoder.requests import one_walk
from shared.plans import Plan, PlanRequest
from shared.walks import CLIENT, Edge, Node, Sequential, compile_walk

IMAGE: Final = "image"
PREPARE: Final = "prepare"
ENCODER: Final = "encoder"
EDGES: Final = ("tokens", "lengths", "pixels")
EMBED: Final = Sequential(
    Node(PREPARE, (), [Edge(name, to=ENCODER) for name in EDGES]),
    Node(ENCODER, [*EDGES], [Edge(EMBEDDING, to=CLIENT(EMBEDDING), on_resume="keep")]),
)
CLASSES: Final = {"clip": "CLIPModel", "siglip": "SiglipModel"}
"""The classes of transformers that are served, by `model_type`."""


class ImageTextOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Options of embeddings.

    Attributes:
        normalize: scale each embedding to length 1. Default: as transformers' `get_text_features` and
            `get_image_features` return it.
    """

    normalize: bool = False


def plan(request: PlanRequest) -> Plan:
    """One walk, whose output is one embedding of each text and then of each image, float32."""
    return (yield from one_walk("embed", request))


def class_of(checkpoint: CheckpointInfo) -> str:
    """The name of the class of a checkpoint, by its architecture, else by its `model_type`; or empty."""
    named = checkpoint.architecture or CLASSES.get(str(checkpoint.config.get("model_type")), "")
    return named if named in CLASSES.values() else ""


def claims(checkpoint: CheckpointInfo) -> Claim | None:
    """Claim checkpoints of CLIP and SigLIP with both towers."""
    return Claim.ARCHITECTURE if class_of(checkpoint) else None


GRAPH: Final = ModelGraph(
    family="image_text",
    nodes={PREPARE: EngineKind.CPU, ENCODER: EngineKind.STATELESS},
    walks={"embed": compile_walk("embed", EMBED)},
    plan=plan,
    modalities=(TEXT, IMAGE),
    options=ImageTextOptions,
    takes_texts=True,
    max_positions=77,
    claims=claims,
    repository="openai/clip-vit-base-patch32",
    serves="image-text encoders: the architectures CLIPModel and SiglipModel",
)
