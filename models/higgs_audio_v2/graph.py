"""Graph and plan of Higgs Audio v2, text to speech.

prepare         a text -> token ids                                             a CPU node
LLM             token ids -> a chunk of frames of codes: its program `speak`    the KV node
codec_decoder   a chunk of frames, and those around it -> samples               a stateless node

Language model and codec take turns in a loop, which ends with the chunk that is marked as the last.
"""

from typing import Final

import msgspec

from models.base import EngineKind, ModelGraph
from models.checkpoints.claims import CheckpointInfo, Claim
from models.dia.graph import LOOP, SPARE, SPEAK
from models.higgs_audio_v2.options import CHUNK_FRAMES, HiggsAudioOptions
from models.programs import PROGRAM
from models.sequence_request import PrepareRequest
from shared.errors import ClientError
from shared.events import Usage
from shared.plans import Finish, Plan, PlanRequest, Walk
from shared.walks import CLIENT, KEEP, Edge, Loop, Node, Sequential, compile_walk

LLM: Final = "LLM"
CODEC: Final = "codec_decoder"
COMPANION: Final = "audio_tokenizer"
"""The key in `model_kwargs` of the codec's folder."""
VOICES: Final = ("auto",)
"""The model has no voices with names: it finds one for the text and the scene."""
SAMPLE_RATE: Final = 24_000
FIRST_FRAMES: Final = ((4, 4), (16, 8), (32, 16))
"""The frames of the first chunk while up to so many requests run; beyond, it is a whole chunk."""

_PREPARE: Final = Node("prepare", inputs=(), outputs=(Edge("token_ids", to=KEEP),))
_SPEAK: Final = Loop(
    LOOP,
    Sequential(
        Node(LLM, ["token_ids"], [Edge("codes", to=CODEC), Edge("span", to=CODEC)]),
        Node(CODEC, ["codes", "span"], [Edge("audio", to=CLIENT("audio"), on_resume="keep")]),
    ),
    max_iters="max_tokens",
)


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of `prepare`.

    Attributes:
        shortest: the fewest steps that give a frame.
        temperature, top_p, top_k: those of the request, or else the checkpoint's.
    """

    prompt_tokens: int
    shortest: int
    temperature: float
    top_p: float
    top_k: int


class Speech(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of the walk `speak`, for its program.

    Attributes:
        max_tokens: the most steps, as transformers' `max_new_tokens`.
        first_frames: those of the first chunk.
    """

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    first_frames: int


def plan(request: PlanRequest) -> Plan:
    """Prepare the text, then speak chunk after chunk."""
    step = yield Walk("prepare", args=PrepareRequest(inputs=request.inputs, params=request.params))
    prepared = step.facts_as(Prepared)
    speech = Speech(
        max_tokens=_steps(request, prepared),
        temperature=prepared.temperature,
        top_p=prepared.top_p,
        top_k=prepared.top_k,
        first_frames=first_frames(request),
    )
    args = {PROGRAM: SPEAK, **msgspec.to_builtins(speech)}
    done = yield Walk(SPEAK, inputs={"token_ids": step.handle("token_ids")}, args=args)
    counts: dict[str, int] = next(one.facts["counts"] for one in done.walks if "counts" in one.facts)
    usage = Usage(
        prompt_tokens=prepared.prompt_tokens,
        completion_tokens=counts["steps"],
        counts={"frames": counts["frames"]},
    )
    return Finish(usage=usage, finish_reasons=("stop" if counts["ended"] else "length",))


def _steps(request: PlanRequest, prepared: Prepared) -> int:
    """The most steps of the answer.

    Raises:
        ClientError: more are asked for than there is room for.
    """
    limits, asked = request.limits, request.params.max_tokens
    room = min(limits.max_seq_len, limits.kv_tokens - SPARE) - prepared.prompt_tokens
    if (asked or prepared.shortest) > room:
        raise ClientError(
            f"max_tokens: expected at most {max(room, 0)} behind {prepared.prompt_tokens} tokens of prompt, "
            f"found {asked or prepared.shortest}: shorten the text or the answer, or raise max_seq_len or "
            "kv_tokens",
            code="context_length_exceeded",
        )
    if asked is not None:
        return asked
    return max(prepared.shortest, int(min(limits.default_max_tokens, room) * limits.max_tokens_share))


def first_frames(request: PlanRequest) -> int:
    """The frames of the first chunk of sound: the request's own, or by the load when it was admitted."""
    asked = request.options_as(HiggsAudioOptions).initial_codec_chunk_frames
    if asked is not None:
        return asked
    running = request.limits.concurrent
    return next((frames for most, frames in FIRST_FRAMES if running <= most), CHUNK_FRAMES)


def claims(checkpoint: CheckpointInfo) -> Claim | None:
    """Claim the checkpoints of transformers' class."""
    is_ours = checkpoint.architecture == "HiggsAudioV2ForConditionalGeneration"
    return Claim.ARCHITECTURE if is_ours else None


GRAPH: Final = ModelGraph(
    family="higgs_audio_v2",
    nodes={"prepare": EngineKind.CPU, LLM: EngineKind.KV, CODEC: EngineKind.STATELESS},
    walks={"prepare": compile_walk("prepare", _PREPARE), SPEAK: compile_walk(SPEAK, _SPEAK)},
    plan=plan,
    media={"audio": {"sample_rate": SAMPLE_RATE, "num_channels": 1, "format": "pcm_s16le"}},
    options=HiggsAudioOptions,
    voices=VOICES,
    repository="bosonai/higgs-audio-v2-generation-3B-base",
    kwargs=frozenset({COMPANION}),
    paths=frozenset({COMPANION}),
    claims=claims,
    serves="Higgs Audio v2: the architecture HiggsAudioV2ForConditionalGeneration",
)
