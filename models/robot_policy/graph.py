"""Graph and plan of robot policies: one walk, from an observation to a chunk of actions.

prepare       images, state, instruction -> pixels, token ids, state            a CPU node
vit_encoder   pixels -> rows of the prefix                                      the vision tower
LLM           rows, token ids, state -> actions: its program `actions`          the KV node
denormalize   the model's actions -> the robot's                                a CPU node
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from models.base import EngineKind, ModelGraph
from models.checkpoints.claims import CheckpointInfo, Claim
from models.programs import PROGRAM
from models.room import Room
from shared.errors import ClientError
from shared.events import Usage
from shared.plans import Finish, Plan, PlanRequest, Walk
from shared.walks import CLIENT, Edge, Node, Sequential, compile_walk

ENCODER: Final = "vit_encoder"
LLM: Final = "LLM"
ACTIONS: Final = "actions"
"""The program of the KV node, and the edge of its result."""
MAX_STEPS: Final = 100
MAX_HORIZON: Final = 1024
KWARGS: Final = frozenset({"action_horizon", "num_flow_steps", "tokenizer"})
"""The families' own keys of `model_kwargs`. `tokenizer` is a folder with the tokenizer of PaliGemma."""


class PolicyOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Options of a robot policy.

    Attributes:
        robot_state: the robot's state in its own units: joint angles, gripper positions and so on. Needed,
            unless a file of arrays has it.
        num_flow_steps: the steps in which actions are computed from noise. Default: the checkpoint's, 10.
    """

    robot_state: Annotated[list[float], Meta(min_length=1, max_length=1024)] | None = None
    num_flow_steps: Annotated[int, Meta(ge=1, le=MAX_STEPS)] | None = None


ACT: Final = Sequential(
    Node(
        "prepare",
        (),
        (
            Edge("pixels", to=ENCODER),
            Edge("token_ids", to=LLM),
            Edge("state", to=LLM),
            Edge("robot", to="denormalize"),
        ),
    ),
    Node(ENCODER, ("pixels",), (Edge("rows", to=LLM),)),
    Node(LLM, ("token_ids", "state", "rows"), (Edge(ACTIONS, to="denormalize"),)),
    Node("denormalize", (ACTIONS, "robot"), (Edge("action", to=CLIENT("action"), on_resume="keep"),)),
)


def plan(request: PlanRequest) -> Plan:
    """One walk. Its output is one tensor, float32 (horizon, dimensions)."""
    options, inputs = request.options_as(PolicyOptions), request.inputs
    if inputs.messages or inputs.token_ids:
        raise ClientError("text: a robot policy takes one instruction as text, found messages or token ids")
    if not inputs.files:
        raise ClientError(
            "files: expected the images of the robot's cameras, or a file of arrays, found none",
            code="missing_required_parameter",
        )
    args = {"inputs": inputs, "options": options, PROGRAM: ACTIONS, "steps": options.num_flow_steps}
    done = yield Walk("act", args=args)
    return Finish(usage=Usage(prompt_tokens=done.fact("prompt_tokens")), finish_reasons=("stop",))


def policy_graph(
    family: str,
    claims: Callable[[CheckpointInfo], Claim | None],
    *,
    serves: str,
    repository: str,
    room: Callable[[Path], Sequence[Room]],
) -> ModelGraph:
    """The graph of a family; the arguments are fields of `ModelGraph`."""
    return ModelGraph(
        family=family,
        nodes={
            "prepare": EngineKind.CPU,
            ENCODER: EngineKind.STATELESS,
            LLM: EngineKind.KV,
            "denormalize": EngineKind.CPU,
        },
        walks={"act": compile_walk("act", ACT)},
        plan=plan,
        modalities=("text", "image", "tensor"),
        options=PolicyOptions,
        repository=repository,
        kwargs=KWARGS,
        paths=frozenset({"tokenizer"}),
        max_positions=2048,
        claims=claims,
        serves=serves,
        room=room,
    )
