"""The graph and the plan."""

from typing import Annotated

import msgspec

from models.base import EngineKind, ModelGraph
from models.decoder_lm.graph import PREPARE
from models.sequence_request import PreparedPrompt, PrepareRequest
from shared.events import Usage
from shared.plans import Finish, Plan, PlanRequest, Walk
from shared.walks import CLIENT, Edge, Node, Sequential, compile_walk


class StepOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a picture.

    Attributes:
        steps: how many are taken.
        size: the numbers of the picture.
    """

    steps: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 4
    size: Annotated[int, msgspec.Meta(ge=1, le=64)] = 6


PAINT = Sequential(
    Node("denoiser", inputs=("token_ids",), outputs=(Edge("latents", to="decoder"),)),
    Node("decoder", inputs=("latents",), outputs=(Edge("image", to=CLIENT("image"), on_resume="keep"),)),
)


def plan(request: PlanRequest) -> Plan:
    """Prepare the text, and paint."""
    inputs = msgspec.structs.replace(request.inputs, output_modalities=["text"])
    options = request.options_as(StepOptions)
    step = yield Walk("prepare", args=PrepareRequest(inputs=inputs, params=request.params))
    args = {"steps": options.steps, "size": options.size}
    yield Walk("paint", inputs={"token_ids": step.handle("token_ids")}, args=args)
    usage = Usage(prompt_tokens=step.facts_as(PreparedPrompt).prompt_tokens)
    return Finish(usage=usage, finish_reasons=("stop",))


GRAPH = ModelGraph(
    family="stepping",
    nodes={"prepare": EngineKind.CPU, "denoiser": EngineKind.STATELESS, "decoder": EngineKind.STATELESS},
    walks={"prepare": compile_walk("prepare", PREPARE), "paint": compile_walk("paint", PAINT)},
    plan=plan,
    options=StepOptions,
)
