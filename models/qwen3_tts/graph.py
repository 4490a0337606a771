"""Graph and plan of Qwen3-TTS, text to speech.

    prepare          a text, a voice and a language -> token ids                    a CPU node
    talker_prefill   token ids -> the first frame of codes                          the KV node
    talker_decode    a resident loop: frame -> next frame, until the speech ends    the KV node
    codec_chunk      a loop: a chunk of frames -> samples                           the stateless node

The codec's walk runs at the same time as the others, and ends with the chunk that is marked as the last.
The names of nodes and walks are M*'s.
"""

from collections.abc import Sequence
from typing import Any, Final

from msgspec.structs import replace

from models.base import EngineKind, ModelGraph
from models.checkpoints.claims import CheckpointInfo, Claim
from models.decoder_lm.graph import new_token_budget
from models.qwen3_tts.options import Qwen3TtsOptions
from models.sequence_request import (
    PreparedPrompt,
    PrepareRequest,
    SamplingParams,
    SequenceFacts,
    SequenceRequest,
)
from models.text import generation_config
from shared.events import Usage
from shared.plans import Chain, Join, Plan, PlanRequest, Start, SubPlan, Walk
from shared.walks import CLIENT, KEEP, Edge, LeftContext, Loop, Node, StreamingEdge, StreamInput, compile_walk

TALKER: Final = "Talker"
CODEC: Final = "Codec"

SAMPLE_RATE: Final = 24_000
MAX_FRAMES: Final = 2048
"""The default of the published package: 164 seconds."""
CHUNK_FRAMES: Final = 300
CONTEXT_FRAMES: Final = 25
"""Frames of 80 ms: of a chunk of audio, and of those before it that it is made with, as published."""
FIRST_FRAMES: Final = ((4, 4), (16, 8), (32, 16))
"""The frames of the first chunk while up to so many requests run; beyond, it has as many as the context."""
VOICES: Final = ("Vivian", "Serena", "Uncle_Fu", "Dylan", "Eric", "Ryan", "Aiden", "Ono_Anna", "Sohee")
"""The voices of the published checkpoints, the default first."""


class PreparedSpeech(PreparedPrompt, frozen=True, kw_only=True, omit_defaults=True):
    """Facts that `prepare` reports to the plan.

    Attributes:
        inner_sampling: of the codes of a frame after the first.
        codes: those that the prompt has before its text: the language and the voice between marks.
        plain_tokens: the tokens of the prompt before these codes.
    """

    inner_sampling: SamplingParams
    codes: Sequence[int]
    plain_tokens: int


class SpeechRequest(SequenceRequest, frozen=True, kw_only=True, omit_defaults=True):
    """Arguments of the walks that speak; see `PreparedSpeech`."""

    codes: Sequence[int]
    plain_tokens: int


CODES: Final = StreamingEdge(
    "codec_tokens",
    to=CODEC,
    chunks=LeftContext(CHUNK_FRAMES, CONTEXT_FRAMES, first="initial_codec_chunk_frames"),
    after_end="stop",
)
_PREPARE: Final = Node("prepare", inputs=(), outputs=(Edge("token_ids", to=KEEP),))
_PREFILL: Final = Node(TALKER, inputs=("token_ids",), outputs=(Edge("token", to=KEEP), CODES))
_DECODE: Final = Loop(
    "decode",
    Node(TALKER, inputs=("token",), outputs=(Edge("token", to=TALKER), CODES)),
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
    prepared = step.facts_as(PreparedSpeech)
    args = _speech_args(request, prepared)
    yield Start("sound", _sound(first_frames(request)))
    answer = yield Chain(
        Walk("talker_prefill", inputs={"token_ids": step.handle("token_ids")}, args=args),
        Walk("talker_decode", args=args),
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
    asked = request.options_as(Qwen3TtsOptions).initial_codec_chunk_frames
    if asked is not None:
        return asked
    running = request.limits.concurrent
    return next((frames for most, frames in FIRST_FRAMES if running <= most), CONTEXT_FRAMES)


def _speech_args(request: PlanRequest, prepared: PreparedSpeech) -> SpeechRequest:
    limits, max_tokens = request.limits, request.params.max_tokens
    if max_tokens is None:
        room = min(limits.max_seq_len, limits.kv_tokens) - prepared.prompt_tokens
        max_tokens = max(1, min(MAX_FRAMES, limits.default_max_tokens, room))
    max_tokens = new_token_budget(prepared.prompt_tokens, max_tokens, limits)
    sampling = prepared.sampling
    if request.params.ignore_eos:  # the code of the end has no sound, so it must not be said at all
        sampling = replace(sampling, min_tokens=max_tokens)
    return SpeechRequest(
        max_tokens=max_tokens,
        sampling=sampling,
        inner_sampling=prepared.inner_sampling,
        choice=request.params.choice,
        codes=prepared.codes,
        plain_tokens=prepared.plain_tokens,
    )


def claims(checkpoint: CheckpointInfo) -> Claim | None:
    """Claim the published class, whose checkpoints without preset voices are refused by name later."""
    found: Any = checkpoint.architecture
    return Claim.ARCHITECTURE if found == "Qwen3TTSForConditionalGeneration" else None


GRAPH: Final = ModelGraph(
    family="qwen3_tts",
    nodes={"prepare": EngineKind.CPU, TALKER: EngineKind.KV, CODEC: EngineKind.STATELESS},
    walks={
        "prepare": compile_walk("prepare", _PREPARE),
        "talker_prefill": compile_walk("talker_prefill", _PREFILL),
        "talker_decode": compile_walk("talker_decode", _DECODE),
        "codec_chunk": compile_walk("codec_chunk", _CODEC_CHUNK),
    },
    plan=plan,
    media={"audio": {"sample_rate": SAMPLE_RATE, "num_channels": 1, "format": "pcm_s16le"}},
    options=Qwen3TtsOptions,
    voices=VOICES,
    repository="Qwen/Qwen3-TTS-12Hz-0.6B-CustomVoice",
    claims=claims,
    serves="Qwen3-TTS with preset voices: the architecture Qwen3TTSForConditionalGeneration",
    remarks=lambda checkpoint, _: generation_config.remarks_of(checkpoint),
)
