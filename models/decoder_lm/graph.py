"""Decoder-only language models: the pure face.

    prepare   messages or text -> token ids                          a CPU node
    prefill   token ids -> the first new token                       the KV node
    decode    a resident loop: token -> next token, until a stop     the KV node
    score     token ids -> no token: the prompt alone is echoed,     the KV node
              made an embedding, put out as its states, or computed for others

Prefill and decode are one chain: there is no round trip between the first and the second token.
"""

from typing import Any, Final

from models.base import OF_PROMPTS, EngineKind, ModelGraph
from shared.errors import ClientError
from shared.events import Limits, Usage
from shared.plans import Chain, Finish, Plan, PlanRequest, StepResult, Walk
from shared.walks import CLIENT, KEEP, Edge, Loop, Node, compile_walk

PREPARE: Final = Node("prepare", inputs=(), outputs=(Edge("token_ids", to=KEEP),))
PREFILL: Final = Node("llm", inputs=("token_ids",), outputs=(Edge("token", to=CLIENT("text")),))
DECODE: Final = Loop(
    "decode",
    Node("llm", inputs=("token",), outputs=(Edge("token", to="llm"), Edge("token", to=CLIENT("text")))),
    max_iters="max_tokens",
)

SCORE: Final = Node("llm", inputs=("token_ids",), outputs=())


def new_token_budget(prompt_tokens: int, asked: int | None, limits: Limits) -> int:
    """How many new tokens the request may have: all it asked for, or a share while there is much to do.

    Raises:
        ClientError: prompt and answer do not fit the context, or the KV pool.
    """
    room, what = min(
        (limits.max_seq_len, "the model's context length"), (limits.kv_tokens, "the size of the KV cache")
    )
    wanted = asked if asked is not None else max(1, min(limits.default_max_tokens, room - prompt_tokens))
    if limits.max_tokens_share < 1 and wanted:
        wanted = max(1, int(wanted * limits.max_tokens_share))
    if prompt_tokens + wanted > room:
        raise ClientError(
            f"{what} is {room} tokens, but {prompt_tokens + wanted} were requested "
            f"({prompt_tokens} in the prompt, {wanted} for the answer); shorten the prompt or max_tokens",
            code="context_length_exceeded",
        )
    return wanted


def plan(request: PlanRequest) -> Plan:
    """Prepare, check that it fits, then prefill and decode in one go; or see to the prompt and no more."""
    prepared = yield Walk("prepare", args={"inputs": request.inputs, "params": request.params})
    prompt_tokens: int = prepared.fact("prompt_tokens")
    if not OF_PROMPTS.isdisjoint(request.inputs.output_modalities) or request.params.warm:
        return (yield from _prompt_alone(request, prepared))
    args: dict[str, Any] = {
        "max_tokens": new_token_budget(prompt_tokens, request.params.max_tokens, request.limits),
        "sampling": prepared.fact("sampling"),
        "stop": request.params.stop,
        "ignore_eos": request.params.ignore_eos,
    }
    inputs, begin = {"token_ids": prepared.handle("token_ids")}, args | _asked(request, prepared)
    if args["max_tokens"] == 0:
        answer = yield Walk("score", inputs=inputs, args=begin)
    else:
        answer = yield Chain(Walk("prefill", inputs=inputs, args=begin), Walk("decode", args=args))
    usage = Usage(prompt_tokens=prompt_tokens, completion_tokens=answer.fact("completion_tokens"))
    return Finish(usage=usage, finish_reasons=(answer.fact("finish_reason"),))


def _prompt_alone(request: PlanRequest, prepared: StepResult) -> Plan:
    """Make an embedding of the prompt, put out its states, or compute it for others that begin alike."""
    prompt_tokens: int = prepared.fact("prompt_tokens")
    new_token_budget(prompt_tokens, 0, request.limits)
    is_warm = request.params.warm
    args = {"warm": True} if is_warm else {"pooling": prepared.fact("pooling")}
    done = yield Walk("score", inputs={"token_ids": prepared.handle("token_ids")}, args=args)
    cached_tokens = done.fact("cached_tokens") if is_warm else 0
    return Finish(
        usage=Usage(prompt_tokens=prompt_tokens, cached_tokens=cached_tokens), finish_reasons=("stop",)
    )


def _asked(request: PlanRequest, prepared: StepResult) -> dict[str, Any]:
    """What a row is told only when it was asked for: orders recorded earlier know nothing of it."""
    params = request.params
    asked: dict[str, Any] = {}
    if params.stop_token_ids:
        asked["stop_token_ids"] = params.stop_token_ids
    if params.choice:
        asked["choice"] = params.choice
    if params.logprobs is not None:
        asked["logprobs"] = params.logprobs
    guide = prepared.fact("guide") if request.inputs.tools else params.guide
    if guide is not None:
        # A guided answer ends where its guide may end, so its end is one also when it is to be ignored: it is
        # not chosen then as long as anything else may follow.
        asked |= {"guide": guide, "ignore_eos": False}
        if params.ignore_eos:
            asked["exhausts_guide"] = True
    if params.echo:
        asked["echo"] = prepared.fact("prompt_text")
    return asked


GRAPH: Final = ModelGraph(
    family="decoder_lm",
    nodes={"prepare": EngineKind.CPU, "llm": EngineKind.KV},
    walks={
        "prepare": compile_walk("prepare", PREPARE),
        "prefill": compile_walk("prefill", PREFILL),
        "decode": compile_walk("decode", DECODE),
        "score": compile_walk("score", SCORE),
    },
    plan=plan,
    embeds=True,
)
