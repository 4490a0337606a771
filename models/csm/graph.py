"""Graph and plan of CSM, text to speech.

    prepare          a text and a speaker -> token ids                              a CPU node
    prefill          token ids -> the first frame of codes                          the KV node
    decode           a resident loop: frame -> next frame, until the speech ends    the KV node
    codec_chunk      a loop: a chunk of frames -> samples                           the stateless node

The codec's walk runs at the same time as the others, and ends with the chunk that is marked as the last.
"""

from typing import Final

from models.base import EngineKind, ModelGraph
from models.checkpoints.claims import CheckpointInfo, Claim
from models.csm.options import CsmOptions
from models.decoder_lm.graph import new_token_budget
from models.sequence_request import (
    PreparedPrompt,
    PrepareRequest,
    SamplingParams,
    SequenceFacts,
    SequenceRequest,
)
from shared.events import Usage
from shared.plans import Chain, Join, Plan, PlanRequest, Start, SubPlan, Walk
from shared.walks import CLIENT, KEEP, Edge, LeftContext, Loop, Node, StreamingEdge, StreamInput, compile_walk

LLM: Final = "LLM"
CODEC: Final = "codec_decoder"

SAMPLE_RATE: Final = 24_000
MAX_FRAMES: Final = 1125
"""The default of the published generator: 90 seconds."""
CHUNK_FRAMES: Final = 25
CONTEXT_FRAMES: Final = 50
"""Frames of 80 ms: of a chunk of audio, and of those before it that it is made with."""
FIRST_FRAMES: Final = ((4, 4), (16, 8), (32, 16))
"""The frames of the first chunk while up to so many requests run; beyond, it is a whole chunk."""
VOICES: Final = tuple(str(speaker) for speaker in range(10))
"""Speakers are numbers, which the prompt begins with; the published examples have 0 and 1."""

CODES: Final = StreamingEdge(
    "codes",
    to=CODEC,
    chunks=LeftContext(CHUNK_FRAMES, CONTEXT_FRAMES, first="initial_codec_chunk_frames"),
    after_end="stop",
)
_PREPARE: Final = Node("prepare", inputs=(), outputs=(Edge("token_ids", to=KEEP),))
_PREFILL: Final = Node(LLM, inputs=("token_ids",), outputs=(Edge("token", to=KEEP), CODES))
_DECODE: Final = Loop(
    "decode",
    Node(LLM, inputs=("token",), outputs=(Edge("token", to=LLM), CODES)),
    max_iters="max_tokens",
)
_CODEC_CHUNK: Final = Loop(
    "chunks",
    Node(
        CODEC,
        inputs=(StreamInput(CODES.name),),
        outputs=(Edge("audio", to=CLIENT("audio"), on_resume="keep"),),
    ),
    max_iters=None,
)


def plan(request: PlanRequest) -> Plan:
    """Prepare the prompt, then speak and make sound of it at the same time."""
    step = yield Walk("prepare", args=PrepareRequest(inputs=request.inputs, params=request.params))
    prepared = step.facts_as(PreparedPrompt)
    args = _speech_args(request, prepared)
    yield Start("sound", _sound(first_frames(request)))
    answer = yield Chain(
        Walk("prefill", inputs={"token_ids": step.handle("token_ids")}, args=args),
        Walk("decode", args=args),
        ends=(CODES.name,),
    )
    yield Join("sound")
    facts: SequenceFacts = answer.facts_as(SequenceFacts)
    usage = Usage(prompt_tokens=prepared.prompt_tokens, completion_tokens=facts.completion_tokens)
    return facts.finish(usage)


def _sound(first: int) -> SubPlan:
    """Make sound of the codes, until their stream ends."""
    yield Walk("codec_chunk", args={"initial_codec_chunk_frames": first})


def first_frames(request: PlanRequest) -> int:
    """The frames of the first chunk of sound: the request's own, or by the load when it was admitted."""
    asked = request.options_as(CsmOptions).initial_codec_chunk_frames
    if asked is not None:
        return asked
    running = request.limits.concurrent
    return next((frames for most, frames in FIRST_FRAMES if running <= most), CHUNK_FRAMES)


def _speech_args(request: PlanRequest, prepared: PreparedPrompt) -> SequenceRequest:
    limits, max_tokens = request.limits, request.params.max_tokens
    if max_tokens is None:
        room = min(limits.max_seq_len, limits.kv_tokens) - prepared.prompt_tokens
        max_tokens = max(1, min(MAX_FRAMES, limits.default_max_tokens, room))
    return SequenceRequest(
        max_tokens=new_token_budget(prepared.prompt_tokens, max_tokens, limits),
        sampling=prepared.sampling,
        inner_sampling=_inner_sampling(request, prepared),
        choice=request.params.choice,
        ignore_eos=request.params.ignore_eos,
    )


def _inner_sampling(request: PlanRequest, prepared: PreparedPrompt) -> SamplingParams:
    """The sampling of the codes of a frame after the first."""
    options = request.options_as(CsmOptions)
    temperature = options.depth_decoder_temperature
    if temperature is None:
        temperature = prepared.sampling.temperature
    return SamplingParams(temperature=temperature, top_k=options.depth_decoder_top_k)


def claims(checkpoint: CheckpointInfo) -> Claim | None:
    """Claim the checkpoints of transformers' class."""
    return Claim.ARCHITECTURE if checkpoint.architecture == "CsmForConditionalGeneration" else None


GRAPH: Final = ModelGraph(
    family="csm",
    nodes={"prepare": EngineKind.CPU, LLM: EngineKind.KV, CODEC: EngineKind.STATELESS},
    walks={
        "prepare": compile_walk("prepare", _PREPARE),
        "prefill": compile_walk("prefill", _PREFILL),
        "decode": compile_walk("decode", _DECODE),
        "codec_chunk": compile_walk("codec_chunk", _CODEC_CHUNK),
    },
    plan=plan,
    media={"audio": {"sample_rate": SAMPLE_RATE, "num_channels": 1, "format": "pcm_s16le"}},
    options=CsmOptions,
    voices=VOICES,
    repository="sesame/csm-1b",
    claims=claims,
    serves="CSM: the architecture CsmForConditionalGeneration",
)
