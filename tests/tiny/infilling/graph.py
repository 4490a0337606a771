"""The graph and the plan: those of language models; the sequence names its program."""

from typing import Annotated, Literal

import msgspec

from models.base import EngineKind, ModelGraph
from models.decoder_lm.graph import DECODE, PREFILL, PREPARE, Prompt, answer
from models.sequence_request import PreparedPrompt, PrepareRequest, SequenceRequest
from shared.plans import Plan, PlanRequest, Walk
from shared.walks import compile_walk


class InfillOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of an answer.

    Attributes:
        way: how blocks are filled in (`nodes`).
        block: the tokens of a block.
    """

    way: Literal["plain", "keep", "crop", "guided", "judged"] = "plain"
    block: Annotated[int, msgspec.Meta(ge=1, le=64)] = 4


def plan(request: PlanRequest) -> Plan:
    """Answer by the program."""
    options = request.options_as(InfillOptions)
    step = yield Walk("prepare", args=PrepareRequest(inputs=request.inputs, params=request.params))

    def start(args: SequenceRequest) -> SequenceRequest:
        return msgspec.structs.replace(args, token_program="infill", options=msgspec.to_builtins(options))

    prompt = Prompt(
        prepared=step.facts_as(PreparedPrompt),
        inputs={"token_ids": step.handle("token_ids")},
        start=start,
    )
    return (yield from answer(request, prompt))


GRAPH = ModelGraph(
    family="infilling",
    nodes={"prepare": EngineKind.CPU, "llm": EngineKind.KV},
    walks={
        "prepare": compile_walk("prepare", PREPARE),
        "prefill": compile_walk("prefill", PREFILL),
        "decode": compile_walk("decode", DECODE),
    },
    plan=plan,
    options=InfillOptions,
    token_programs=True,
)
