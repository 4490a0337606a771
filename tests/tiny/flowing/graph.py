"""The graph and the plan."""

from typing import Annotated

import msgspec

from models.base import EngineKind, ModelGraph
from models.decoder_lm.graph import DECODE, PREFILL, PREPARE
from models.decoder_lm.graph import plan as plan_of_text
from models.programs import PROGRAM
from models.sequence_request import PreparedPrompt, PrepareRequest
from shared.events import Usage
from shared.plans import Finish, Plan, PlanRequest, Walk
from shared.walks import CLIENT, Edge, Node, Sequential, compile_walk


class FlowOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a picture.

    Attributes:
        steps: the steps of the flow.
        latents: the tokens of the picture.
    """

    steps: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 4
    latents: Annotated[int, msgspec.Meta(ge=1, le=64)] = 6


PAINT = Sequential(
    Node("noise", inputs=(), outputs=(Edge("latents", to="llm"),)),
    Node("llm", inputs=("token_ids", "latents"), outputs=(Edge("latents", to="decoder"),)),
    Node("decoder", inputs=("latents",), outputs=(Edge("image", to=CLIENT("image"), on_resume="keep"),)),
)


def plan(request: PlanRequest) -> Plan:
    """Paint, or answer in text."""
    # `prepare` is that of language models, which knows of text alone.
    inputs = msgspec.structs.replace(request.inputs, output_modalities=["text"])
    request = msgspec.structs.replace(request, inputs=inputs)
    if not (request.inputs.text or "").startswith("paint"):
        return (yield from plan_of_text(request))
    options = request.options_as(FlowOptions)
    step = yield Walk("prepare", args=PrepareRequest(inputs=request.inputs, params=request.params))
    args = {PROGRAM: "flow", "steps": options.steps, "latents": options.latents}
    yield Walk("paint", inputs={"token_ids": step.handle("token_ids")}, args=args)
    usage = Usage(prompt_tokens=step.facts_as(PreparedPrompt).prompt_tokens)
    return Finish(usage=usage, finish_reasons=("stop",))


GRAPH = ModelGraph(
    family="flowing",
    nodes={
        "prepare": EngineKind.CPU,
        "llm": EngineKind.KV,
        "noise": EngineKind.STATELESS,
        "decoder": EngineKind.STATELESS,
    },
    walks={
        "prepare": compile_walk("prepare", PREPARE),
        "prefill": compile_walk("prefill", PREFILL),
        "decode": compile_walk("decode", DECODE),
        "paint": compile_walk("paint", PAINT),
    },
    plan=plan,
    options=FlowOptions,
)
