"""Graph and plan of Dia, text to speech.

prepare   a text -> bytes                                                       a CPU node
encoder   bytes -> states; with guidance, those of no text as well              a stateless node
decoder   states -> a chunk of frames of codes: its program `speak`             the KV node
dac       a chunk of frames, and those around it -> samples                     a stateless node

Decoder and codec take turns in a loop, which ends with the chunk that is marked as the last.
"""

from pathlib import Path
from typing import Final

import msgspec

from models.base import EngineKind, ModelGraph
from models.checkpoints.claims import CheckpointInfo, Claim
from models.dia.options import CHUNK_FRAMES, DiaOptions
from models.dia.settings import DiaSettings
from models.programs import PROGRAM
from models.room import Room
from models.sequence_request import PrepareRequest
from shared.errors import ClientError
from shared.events import Usage
from shared.plans import Finish, Plan, PlanRequest, Walk
from shared.walks import CLIENT, KEEP, Edge, Loop, Node, Sequential, compile_walk

ENCODER: Final = "encoder"
DECODER: Final = "decoder"
CODEC: Final = "dac"
SPEAK: Final = "speak"
LOOP: Final = "chunks"
VOICES: Final = ("S1", "S2")
"""The speaker of a text that does not begin with one: `[S1]` or `[S2]`."""
SAMPLE_RATE: Final = 44_100
MAX_POSITIONS: Final = 4111
"""`max_seq_len` where nothing else is configured: the longest text and answer of the published checkpoint."""
FIRST_FRAMES: Final = ((4, 16), (16, 32), (32, 64))
"""The frames of the first chunk while up to so many requests run; beyond, it is a whole chunk."""
SPARE: Final = 32
"""Cells of a context that are not counted on: its last block is not full."""

_PREPARE: Final = Node("prepare", inputs=(), outputs=(Edge("token_ids", to=KEEP),))
_SPEAK: Final = Sequential(
    Node(ENCODER, ["token_ids"], [Edge("states", to=DECODER)]),
    Loop(
        LOOP,
        Sequential(
            Node(DECODER, ["states"], [Edge("codes", to=CODEC), Edge("span", to=CODEC)]),
            Node(CODEC, ["codes", "span"], [Edge("audio", to=CLIENT("audio"), on_resume="keep")]),
        ),
        max_iters="max_tokens",
    ),
)


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of `prepare`.

    Attributes:
        prompt_tokens: the bytes of the text.
        most, shortest: the steps of an answer: the most without `max_tokens`, and the fewest that can be
            asked for.
        temperature, top_p, top_k, guidance_scale: those of the request, or else the checkpoint's.
    """

    prompt_tokens: int
    most: int
    shortest: int
    temperature: float
    top_p: float
    top_k: int
    guidance_scale: float

    @property
    def contexts(self) -> int:
        """With guidance, the answer is computed behind the text and behind none."""
        return 2 if self.guidance_scale > 1 else 1


class Speech(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of the walk `speak`, for its program.

    Attributes:
        max_tokens: the most steps, as transformers' `max_new_tokens`: the frames, and the longest delay.
        first_frames: those of the first chunk.
    """

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    guidance_scale: float
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
        guidance_scale=prepared.guidance_scale,
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
    cells = min(limits.max_seq_len, limits.kv_tokens // prepared.contexts - SPARE)
    room = min(cells - prepared.prompt_tokens, prepared.most)
    if (asked or prepared.shortest) > room:
        raise ClientError(
            f"max_tokens: expected at most {max(room, 0)} behind {prepared.prompt_tokens} bytes of text, "
            f"found {asked or prepared.shortest}: shorten the text or the answer, or raise max_seq_len or "
            "kv_tokens",
            code="context_length_exceeded",
        )
    if asked is not None:
        return asked
    steps = min(limits.default_max_tokens, room)
    return max(prepared.shortest, int(steps * limits.max_tokens_share))


def first_frames(request: PlanRequest) -> int:
    """The frames of the first chunk of sound: the request's own, or by the load when it was admitted."""
    asked = request.options_as(DiaOptions).initial_codec_chunk_frames
    if asked is not None:
        return asked
    running = request.limits.concurrent
    return next((frames for most, frames in FIRST_FRAMES if running <= most), CHUNK_FRAMES)


def claims(checkpoint: CheckpointInfo) -> Claim | None:
    """Claim the checkpoints of transformers' class."""
    return Claim.ARCHITECTURE if checkpoint.architecture == "DiaForConditionalGeneration" else None


def room_of(checkpoint: Path) -> list[Room]:
    """The room of a text and an answer that are as long as can be, with guidance."""
    settings = DiaSettings.read(checkpoint)
    what = f"{settings.max_length} frames of speech behind {settings.text} bytes, with guidance,"
    return [
        Room(
            what=what, tokens=2 * (settings.longest + SPARE), numbers=settings.numbers, stored=settings.stored
        )
    ]


GRAPH: Final = ModelGraph(
    family="dia",
    nodes={
        "prepare": EngineKind.CPU,
        ENCODER: EngineKind.STATELESS,
        DECODER: EngineKind.KV,
        CODEC: EngineKind.STATELESS,
    },
    walks={"prepare": compile_walk("prepare", _PREPARE), SPEAK: compile_walk(SPEAK, _SPEAK)},
    plan=plan,
    media={"audio": {"sample_rate": SAMPLE_RATE, "num_channels": 1, "format": "pcm_s16le"}},
    options=DiaOptions,
    voices=VOICES,
    repository="nari-labs/Dia-1.6B-0626",
    max_positions=MAX_POSITIONS,
    states_length=False,
    kwargs=frozenset({CODEC}),
    paths=frozenset({CODEC}),
    claims=claims,
    room=room_of,
    serves="Dia: the architecture DiaForConditionalGeneration",
)
