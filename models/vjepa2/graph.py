"""Graph of V-JEPA 2: a clip is encoded, and latents of it are predicted unless `skip_predictor` is set."""

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from models.base import EngineKind, ModelGraph
from models.checkpoints.claims import CheckpointInfo, Claim
from shared.errors import ClientError
from shared.events import Usage
from shared.plans import Finish, Plan, PlanRequest, Walk
from shared.walks import CLIENT, Edge, Node, Sequential, compile_walk

Mask = Annotated[list[Annotated[int, Meta(ge=0)] | list[Annotated[int, Meta(ge=0)]]], Meta(min_length=1)]


class VJepa2Options(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The part of a clip's latents to compute; they are counted frame by frame, row by row of patches.

    Attributes:
        num_frames: frames taken evenly, at most all of the video. Default: the checkpoint's clip length. An
            image is repeated, 16 times by default.
        skip_predictor: answer with the latents of the encoder, whatever the masks are.
        context_mask: numbers of the latents that the predictor sees, by default all; also a list of lists.
        target_mask: numbers of the latents to predict, by default all; also a list of lists.
    """

    num_frames: Annotated[int, Meta(ge=1, le=1024)] | None = None
    skip_predictor: bool = False
    context_mask: Mask | None = None
    target_mask: Mask | None = None


LATENTS: Final = CLIENT("video")
MASKS: Final = ("context_mask", "target_mask")
PIXELS: Final = Edge("pixels", to="video_encoder")
ENCODE: Final = Sequential(
    Node("prepare", (), [PIXELS]),
    Node("video_encoder", ["pixels"], [Edge("features", to=LATENTS, on_resume="keep")]),
)
PREDICT: Final = Sequential(
    Node("prepare", (), [PIXELS, *(Edge(name, to="predictor") for name in MASKS)]),
    Node("video_encoder", ["pixels"], [Edge("features", to="predictor")]),
    Node("predictor", ["features", *MASKS], [Edge("predicted", to=LATENTS, on_resume="keep")]),
)


def plan(request: PlanRequest) -> Plan:
    """One walk, whose output is one tensor (1, latents, width), float32."""
    options, files = request.options_as(VJepa2Options), request.inputs.files
    if len(files) != 1 or request.inputs.messages or request.inputs.text:
        raise ClientError(f"files: expected one video or image and no text, found {len(files)}")
    args = {"inputs": request.inputs, "options": options, "digest": files[0].digest}
    done = yield Walk("encode" if options.skip_predictor else "predict", args=args)
    return Finish(usage=Usage(prompt_tokens=done.fact("latents")), finish_reasons=("stop",))


def claims(checkpoint: CheckpointInfo) -> Claim | None:
    """Claim checkpoints of the class VJEPA2Model."""
    return Claim.ARCHITECTURE if checkpoint.architecture == "VJEPA2Model" else None


STATELESS: Final = dict.fromkeys(("video_encoder", "predictor"), EngineKind.STATELESS)
GRAPH: Final = ModelGraph(
    family="vjepa2", nodes={"prepare": EngineKind.CPU, **STATELESS}, plan=plan,
    walks={"encode": compile_walk("encode", ENCODE), "predict": compile_walk("predict", PREDICT)},
    modalities=("video", "image"), repository="facebook/vjepa2-vitl-fpc64-256",
    max_positions=65_536, options=VJepa2Options, claims=claims,
    serves="V-JEPA 2: the architecture VJEPA2Model",
)  # fmt: skip
