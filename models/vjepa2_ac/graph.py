"""Graph of V-JEPA 2-AC. The names of the nodes are those of M*'s placements.

    encode              the latents of a clip             video_encoder
    predict             those behind each of its frames   video_encoder, predictor
    rollout             frame after frame from the first  video_encoder, loop of rollout_predictor
    rollout_streamed    the same, each frame sent at once
    score               candidates against a goal         video_encoder, ac_predictor_mpc, mpc_scorer
    plan                actions that lead to a goal       video_encoder, rollout_predictor (program `mpc`)
    plan_to_file        the same, to a goal that is encoded as well

Each of them begins with the CPU node `prepare`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from models.base import EngineKind, ModelGraph
from models.checkpoints.claims import CheckpointInfo, Claim
from models.programs import PROGRAM
from models.room import Room
from models.vjepa2_ac.options import VJepa2AcOptions
from models.vjepa2_ac.settings import NAME, AcSettings
from shared.errors import ClientError
from shared.events import Usage
from shared.plans import Finish, Plan, PlanRequest, Walk
from shared.walks import CLIENT, Edge, Loop, Node, Section, Sequential, compile_walk

ENCODER: Final = "video_encoder"
PREDICTOR: Final = "predictor"
CANDIDATES: Final = "ac_predictor_mpc"
SCORER: Final = "mpc_scorer"
ROLLOUT: Final = "rollout_predictor"
LATENTS: Final = CLIENT("video")


def _prepare(to: str, *further: Edge) -> Node:
    """Pixels for the encoder, and actions and states for a predictor."""
    return Node("prepare", (), [Edge("pixels", to=ENCODER), Edge("controls", to=to), *further])


def _rollout(*, streamed: bool) -> Sequential:
    # The frame that the client has is the one that the next one follows, also after a crash: one edge.
    frame = "frame"
    return Sequential(
        _prepare(ROLLOUT),
        Node(ENCODER, ["pixels"], [Edge(frame, to=ROLLOUT)]),
        Loop(
            "rollout_loop",
            Node(
                ROLLOUT,
                [frame, "controls"],
                [Edge(frame, to=ROLLOUT), Edge(frame, to=LATENTS, on_resume="keep")],
            ),
            max_iters="horizon",
            accumulated=() if streamed else [frame],
        ),
    )


def _plan(inputs: Sequence[str], *further: Edge) -> Sequential:
    return Sequential(
        _prepare(ROLLOUT, *further),
        Node(ENCODER, ["pixels"], [Edge("frame", to=ROLLOUT)]),
        Node(ROLLOUT, inputs, [Edge("actions", to=CLIENT("action"), on_resume="keep")]),
    )


_GOAL: Final = "goal_hidden"
_PREDICTED: Final = Edge("predicted_hidden", to=LATENTS, on_resume="keep")
WALKS: Final[dict[str, Section]] = {
    "encode": Sequential(
        Node("prepare", (), [Edge("pixels", to=ENCODER)]),
        Node(ENCODER, ["pixels"], [Edge("encoder_hidden", to=LATENTS, on_resume="keep")]),
    ),
    "predict": Sequential(
        _prepare(PREDICTOR),
        Node(ENCODER, ["pixels"], [Edge("encoder_hidden", to=PREDICTOR)]),
        Node(PREDICTOR, ["encoder_hidden", "controls"], [_PREDICTED]),
    ),
    "rollout": _rollout(streamed=False),
    "rollout_streamed": _rollout(streamed=True),
    "score": Sequential(
        _prepare(CANDIDATES, Edge(_GOAL, to=SCORER)),
        Node(ENCODER, ["pixels"], [Edge("encoder_hidden", to=CANDIDATES)]),
        Node(CANDIDATES, ["encoder_hidden", "controls"], [Edge("predicted_hidden", to=SCORER)]),
        Node(
            SCORER,
            ["predicted_hidden", _GOAL],
            [
                Edge("best_index", to=CLIENT("scalar"), on_resume="keep"),
                Edge("costs", to=CLIENT("tensor"), on_resume="keep"),
                _PREDICTED,
            ],
        ),
    ),
    "plan": _plan(["frame", "controls", _GOAL], Edge(_GOAL, to=ROLLOUT)),
    "plan_to_file": _plan(["frame", "controls"]),
}
_PROGRAMS: Final = {"rollout": "rollout", "rollout_streamed": "rollout", "plan": "mpc", "plan_to_file": "mpc"}


def plan(request: PlanRequest) -> Plan:
    """One walk, as the options say."""
    options = request.options_as(VJepa2AcOptions)
    files, walk = request.inputs.files, options.walk
    wanted = 2 if walk == "plan_to_file" else 1
    if len(files) != wanted or request.inputs.messages or request.inputs.text:
        what = "the present frame and the goal" if wanted == 2 else "one video or image"
        raise ClientError(f"files: expected {what} and no text, found {len(files)}")
    args: dict[str, Any] = {
        "inputs": request.inputs,
        "options": options,
        "digests": [file.digest for file in files],
        "num_frames": options.num_frames,
        "each": options.is_of_frames,
        "kv_tokens": request.limits.kv_tokens,
    }
    if walk in _PROGRAMS:
        args |= {PROGRAM: _PROGRAMS[walk], "horizon": options.horizon}
    if options.cem and walk in _PROGRAMS:
        args |= _cem(options)
    done = yield Walk(walk, args=args)
    counts: dict[str, int] = next((one.facts["counts"] for one in done.walks if "counts" in one.facts), {})
    usage = Usage(prompt_tokens=done.fact("latents"), counts=counts)
    return Finish(usage=usage, finish_reasons=("stop",))


_OF_CEM: Final = (
    "samples", "topk", "cem_steps", "momentum_mean", "momentum_std", "momentum_mean_gripper",
    "momentum_std_gripper", "maxnorm", "close_gripper",
)  # fmt: skip


def _cem(options: VJepa2AcOptions) -> dict[str, Any]:
    """The arguments of the program `mpc`."""
    if options.topk > options.samples:
        raise ClientError(
            f"topk: expected at most the number of samples, {options.samples}, found {options.topk}"
        )
    return {name: getattr(options, name) for name in _OF_CEM}


def claims(checkpoint: CheckpointInfo) -> Claim | None:
    """Claim folders with a file that is named like the published one."""
    is_ours = any(NAME in path.name for path in checkpoint.folder.glob("*.pt"))
    return Claim.CHECKPOINT if is_ours else None


def room_of(checkpoint: Path) -> list[Room]:
    """The room of one frame of a rollout; a rollout takes as much for each."""
    sizes = AcSettings.read(checkpoint)
    numbers = 2 * sizes.pred_num_hidden_layers * sizes.pred_hidden_size
    frame = Room(what="each frame of a rollout", tokens=sizes.frame_tokens, numbers=numbers, stored="float32")
    return [frame]


GRAPH: Final = ModelGraph(
    family="vjepa2_ac",
    nodes={
        "prepare": EngineKind.CPU,
        **dict.fromkeys((ENCODER, PREDICTOR, CANDIDATES, SCORER), EngineKind.STATELESS),
        ROLLOUT: EngineKind.KV,
    },
    walks={name: compile_walk(name, section) for name, section in WALKS.items()},
    plan=plan,
    modalities=("video", "image"),
    max_positions=16_384,
    options=VJepa2AcOptions,
    claims=claims,
    room=room_of,
    serves="V-JEPA 2-AC: folders with vjepa2-ac-vitg.pt",
)
