"""The graph of a diffusion language model: that of `models.decoder_lm`, whose tokens come from a program.

    prepare   messages or text -> token ids                                a CPU node
    prefill   token ids -> the first tokens                                the KV node
    decode    the further tokens, until the answer ends                    the KV node

The token program of the KV node takes the place of the sampling loop: it decides several tokens at a time.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from models.base import EngineKind, ModelGraph
from models.checkpoints.claims import CheckpointInfo, Claim
from models.decoder_lm.graph import DECODE, PREFILL, PREPARE, Prompt, answer
from models.options import Options
from models.sequence_request import PreparedPrompt, PrepareRequest, SequenceRequest
from shared.errors import ClientError
from shared.plans import Plan, PlanRequest, Walk
from shared.walks import Loop, Node, compile_walk

ProgramOf = Callable[[PlanRequest], str]
"""The token program that computes a request: by its options."""
UNSUPPORTED: Final[Mapping[str, Any]] = {
    "repetition_penalty": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "logit_bias": {},
    "bad_words": [],
    "allowed_token_ids": [],
    "min_tokens": 0,
    "thinking_budget": None,
}
"""Parameters without a meaning where tokens are decided in any order, and the values that turn them off."""


def text_graph(
    family: str,
    *,
    program_of: ProgramOf,
    options: Options,
    claims: Callable[[CheckpointInfo], Claim | None],
    serves: str,
    default_max_tokens: int | None = None,
    **further: Any,
) -> ModelGraph:
    """Return the graph of a family; `further` are other fields of `ModelGraph`.

    `default_max_tokens` is the length of an answer whose request has none, as far as the context allows; None
    is the deployment's.
    """

    def plan(request: PlanRequest) -> Plan:
        refuse_unsupported(request)
        step = yield Walk("prepare", args=PrepareRequest(inputs=request.inputs, params=request.params))
        prepared = step.facts_as(PreparedPrompt)
        if default_max_tokens is not None:
            request = _with_limit(request, default_max_tokens, prepared.prompt_tokens)
        prompt = Prompt(
            prepared=prepared,
            inputs={"token_ids": step.handle("token_ids")},
            start=lambda args: _with_program(args, program_of(request), request.params.options),
        )
        return (yield from answer(request, prompt))

    walks: dict[str, Node | Loop] = {"prepare": PREPARE, "prefill": PREFILL, "decode": DECODE}
    return ModelGraph(
        family=family,
        nodes={"prepare": EngineKind.CPU, "llm": EngineKind.KV},
        walks={name: compile_walk(name, walk) for name, walk in walks.items()},
        plan=plan,
        options=options,
        claims=claims,
        serves=serves,
        token_programs=True,
        **further,
    )


def _with_limit(request: PlanRequest, default: int, prompt_tokens: int) -> PlanRequest:
    """Return the request with a limit of the answer."""
    if request.params.max_tokens is not None:
        return request
    limits = request.limits
    room = min(limits.max_seq_len, limits.kv_tokens) - prompt_tokens
    chosen = max(1, min(default, limits.default_max_tokens, room))
    params = msgspec.structs.replace(request.params, max_tokens=chosen)
    return msgspec.structs.replace(request, params=params)


def refuse_unsupported(request: PlanRequest) -> None:
    """Refuse a request with parameters that a program which decides tokens in any order cannot follow.

    Raises:
        ClientError: it has some.
    """
    params = request.params
    given = [name for name, off in UNSUPPORTED.items() if getattr(params, name) not in (None, off)]
    if params.max_tokens == 0 or params.warm:
        given.append("max_tokens=0" if params.max_tokens == 0 else "warm")
    if given:
        raise ClientError(
            f"{', '.join(given)}: a diffusion language model decides tokens in any order, so this cannot be "
            "computed; leave it out",
            code="not_supported",
        )


def _with_program(args: SequenceRequest, program: str, options: Mapping[str, Any]) -> SequenceRequest:
    return msgspec.structs.replace(args, token_program=program, options=dict(options))
