"""Graph and plan of decoder-only language models.

    prepare   messages or text -> token ids                                a CPU node
    prefill   token ids -> the first new token                             the KV node
    decode    a resident loop: token -> next token, until the answer ends  the KV node
    score     token ids -> no new token: an echo, an embedding or hidden   the KV node
              states of the prompt, or a prompt for the prefix cache

Prefill and decode are one chain: the conductor is not asked between the first and the second token.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import UNSET

from models.base import OF_PROMPTS, EngineKind, ModelGraph
from models.checkpoints.claims import CheckpointInfo, Claim
from models.decoder_lm import multimodal
from models.sequence_request import PreparedPrompt, PrepareRequest, SequenceFacts, SequenceRequest
from models.text import generation_config
from shared.errors import ClientError
from shared.events import Guide, Limits, Usage
from shared.plans import Chain, Finish, Plan, PlanRequest, Walk
from shared.tensors import Handle
from shared.walks import CLIENT, KEEP, Edge, Loop, Node, compile_walk

PREPARE: Final = Node("prepare", inputs=(), outputs=(Edge("token_ids", to=KEEP),))
PREFILL: Final = Node("llm", inputs=("token_ids",), outputs=(Edge("token", to=CLIENT("text")),))
DECODE: Final = Loop(
    "decode",
    Node("llm", inputs=("token",), outputs=(Edge("token", to="llm"), Edge("token", to=CLIENT("text")))),
    max_iters="max_tokens",
)

SCORE: Final = Node("llm", inputs=("token_ids",), outputs=())


def new_token_budget(prompt_tokens: int, max_tokens: int | None, limits: Limits) -> int:
    """The limit of new tokens: the requested one, or a share of it under load (`max_tokens_share`).

    Raises:
        ClientError: prompt and answer do not fit the context, or the KV pool.
    """
    room, what = min(
        (limits.max_seq_len, "the model's context length"), (limits.kv_tokens, "the size of the KV cache")
    )
    wanted = (
        max_tokens if max_tokens is not None else max(1, min(limits.default_max_tokens, room - prompt_tokens))
    )
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
    """Prepare the prompt, check that it fits, then prefill and decode in one step."""
    step = yield Walk("prepare", args=PrepareRequest(inputs=request.inputs, params=request.params))
    prompt = Prompt(
        prepared=step.facts_as(PreparedPrompt),
        inputs={"token_ids": step.handle("token_ids")},
        start=_as_it_is,
    )
    return (yield from answer(request, prompt))


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prepared prompt, and the walks that take it.

    Attributes:
        inputs: of the walk that starts the sequence.
        start: makes the arguments of that walk of those that any prompt has.
        prefill: the walk that starts an answer.
        score: the walk over a prompt without an answer.
        decode: the walk that continues an answer.
    """

    prepared: PreparedPrompt
    inputs: Mapping[str, Handle]
    start: Callable[[SequenceRequest], SequenceRequest]
    prefill: str = "prefill"
    score: str = "score"
    decode: str = "decode"


def _as_it_is(args: SequenceRequest) -> SequenceRequest:
    return args


def answer(request: PlanRequest, prompt: Prompt) -> Plan:
    """Check that a prepared prompt fits, then prefill and decode in one step."""
    prepared = prompt.prepared
    if not OF_PROMPTS.isdisjoint(request.inputs.output_modalities) or request.params.warm:
        return (yield from _without_answer(request, prompt))
    max_tokens = new_token_budget(prepared.prompt_tokens, request.params.max_tokens, request.limits)
    decode = SequenceRequest(
        max_tokens=max_tokens,
        sampling=prepared.sampling,
        stop=request.params.stop or prepared.stop,
        ignore_eos=request.params.ignore_eos,
    )
    begin = prompt.start(_first_walk_args(request, prepared, decode))
    if max_tokens == 0:
        ended = yield Walk(prompt.score, inputs=prompt.inputs, args=begin)
    else:
        first = Walk(prompt.prefill, inputs=prompt.inputs, args=begin)
        ended = yield Chain(first, Walk(prompt.decode, args=decode))
    facts: SequenceFacts = ended.facts_as(SequenceFacts)
    usage = Usage(
        prompt_tokens=prepared.prompt_tokens,
        completion_tokens=facts.completion_tokens,
        counts=facts.counts,
        reasoning_tokens=facts.reasoning_tokens,
    )
    return facts.finish(usage)


def _without_answer(request: PlanRequest, prompt: Prompt) -> Plan:
    """Emit an embedding or hidden states of the prompt, or compute the prompt for the prefix cache."""
    prepared = prompt.prepared
    new_token_budget(prepared.prompt_tokens, 0, request.limits)
    if not request.params.warm:
        args = prompt.start(SequenceRequest(pooling=prepared.pooling))
        yield Walk(prompt.score, inputs=prompt.inputs, args=args)
        return Finish(usage=Usage(prompt_tokens=prepared.prompt_tokens), finish_reasons=("stop",))
    step = yield Walk(prompt.score, inputs=prompt.inputs, args=prompt.start(SequenceRequest(warm=True)))
    usage = Usage(prompt_tokens=prepared.prompt_tokens, cached_tokens=step.fact("cached_tokens"))
    return Finish(usage=usage, finish_reasons=("stop",))


def _first_walk_args(
    request: PlanRequest, prepared: PreparedPrompt, decode: SequenceRequest
) -> SequenceRequest:
    """The arguments of the walk that starts the sequence: those of `decode`, and what is optional."""
    params = request.params
    guide = params.guide if prepared.guide is UNSET else prepared.guide
    is_guided = isinstance(guide, Guide)
    return msgspec.structs.replace(
        decode,
        # A guided answer ends only where its guide may end. With `ignore_eos` the guide is exhausted instead:
        # the answer does not end while the guide allows another token.
        ignore_eos=decode.ignore_eos and not is_guided,
        stop_token_ids=params.stop_token_ids,
        choice=params.choice,
        logprobs=params.logprobs,
        guide=guide if is_guided else None,
        exhausts_guide=is_guided and params.ignore_eos,
        echo=prepared.prompt_text if params.echo else None,
        echoes_ids=params.echo == "ids",
        reasoning=prepared.reasoning,
    )


def claims(checkpoint: CheckpointInfo) -> Claim | None:
    """Claim every causal language model, and those of some multimodal checkpoints."""
    if checkpoint.architecture in multimodal.LANGUAGE_MODELS:
        return Claim.ARCHITECTURE
    return Claim.GENERIC if checkpoint.architecture.endswith(("ForCausalLM", "LMHeadModel")) else None


def remarks(checkpoint: Path, kwargs: Mapping[str, Any]) -> list[str]:
    """Say what of a checkpoint is not served, or not applied."""
    return [*multimodal.remarks_of(checkpoint), *generation_config.remarks_of(checkpoint)]


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
    takes_adapters=True,
    cuts_prompts=True,
    claims=claims,
    serves="decoder-only language models: an architecture ...ForCausalLM or ...LMHeadModel",
    remarks=remarks,
)
