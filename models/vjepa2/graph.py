"""Graph of V-JEPA 2: a clip is encoded, and latents of it, or behind it, are predicted."""

from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from models.base import EngineKind, ModelGraph
from models.checkpoints.claims import CheckpointInfo, Claim
from shared.errors import ClientError
from shared.events import Usage
from shared.plans import Finish, Plan, PlanRequest, Walk
from shared.walks import CLIENT, Edge, Loop, Node, Sequential, compile_walk

Mask = Annotated[list[Annotated[int, Meta(ge=0)] | list[Annotated[int, Meta(ge=0)]]], Meta(min_length=1)]


class VJepa2Options(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The part of a clip's latents to compute; they are counted frame by frame, row by row of patches.

    Attributes:
        num_frames: frames taken evenly, at most all of the video. Default: the checkpoint's clip length. An
            image is repeated, 16 times by default.
        skip_predictor: answer with the latents of the encoder, whatever the masks are.
        context_mask: numbers of the latents that the predictor sees, by default all; also a list of lists.
        target_mask: numbers of the latents to predict, by default all; also a list of lists.
        rollout_horizon: predict two frames so many times, each time a second behind the clip, which then
            moves on by them. 0 and 1: one prediction, as the masks say.
        stream_rollout: send each prediction of a rollout when it is computed.
    """

    num_frames: Annotated[int, Meta(ge=1, le=1024)] | None = None
    skip_predictor: bool = False
    context_mask: Mask | None = None
    target_mask: Mask | None = None
    rollout_horizon: Annotated[int, Meta(ge=0, le=16)] = 0
    stream_rollout: bool = False

    @property
    def walk(self) -> str:
        """The walk of the request; the order of the cases is M*'s."""
        if self.skip_predictor:
            return "encode"
        if self.rollout_horizon > 1:
            return "rollout_streamed" if self.stream_rollout else "rollout"
        return "predict"


ROLLOUT: Final = "rollout_predictor"
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


def _rollout(*, streamed: bool) -> Sequential:
    """A loop over the latents of the clip, to which each prediction is appended."""
    window = Edge("features", to=ROLLOUT)
    step = Node(ROLLOUT, ["features"], [window, Edge("predicted", to=LATENTS, on_resume="keep")])
    return Sequential(
        Node("prepare", (), [PIXELS]),
        Node("video_encoder", ["pixels"], [window]),
        Loop("rollout_loop", step, max_iters="horizon", accumulated=() if streamed else ["predicted"]),
    )


def plan(request: PlanRequest) -> Plan:
    """One walk. Its output is a tensor (1, latents, width), float32, or one for each step of a rollout."""
    options, files = request.options_as(VJepa2Options), request.inputs.files
    if len(files) != 1 or request.inputs.messages or request.inputs.text:
        raise ClientError(f"files: expected one video or image and no text, found {len(files)}")
    args: dict[str, Any] = {"inputs": request.inputs, "options": options, "digest": files[0].digest}
    if options.walk.startswith("rollout"):
        if ROLLOUT in request.limits.absent_nodes:
            raise ClientError(
                f"rollout_horizon: this deployment has no node {ROLLOUT}: ask for 0, or place it",
                code="not_supported",
            )
        args["horizon"] = options.rollout_horizon
    done = yield Walk(options.walk, args=args)
    return Finish(usage=Usage(prompt_tokens=done.fact("latents")), finish_reasons=("stop",))


def claims(checkpoint: CheckpointInfo) -> Claim | None:
    """Claim checkpoints of the class VJEPA2Model."""
    return Claim.ARCHITECTURE if checkpoint.architecture == "VJEPA2Model" else None


WALKS: Final = {
    "encode": ENCODE,
    "predict": PREDICT,
    "rollout": _rollout(streamed=False),
    "rollout_streamed": _rollout(streamed=True),
}
STATELESS: Final = dict.fromkeys(("video_encoder", "predictor", ROLLOUT), EngineKind.STATELESS)
GRAPH: Final = ModelGraph(
    family="vjepa2", nodes={"prepare": EngineKind.CPU, **STATELESS}, plan=plan,
    walks={name: compile_walk(name, section) for name, section in WALKS.items()},
    optional=frozenset({ROLLOUT}),
    modalities=("video", "image"), repository="facebook/vjepa2-vitl-fpc64-256",
    max_positions=65_536, options=VJepa2Options, claims=claims,
    serves="V-JEPA 2: the architecture VJEPA2Model",
)  # fmt: skip
