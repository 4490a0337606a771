"""Orpheus: the pure face.

    prepare      a text and a voice -> token ids                        a CPU node
    prefill      token ids -> the first new token                       the KV node
    decode       a resident loop: token -> next token, until a stop     the KV node
    snac_chunk   a loop: a window of audio tokens -> samples            the stateless node

Two partitions run at the same time: the language model, and SNAC. A stream joins them: audio tokens in the
order of prefill and decode, cut into windows of four frames, one frame on each time. SNAC's walk ends by
itself, with the chunk that is marked as the last.

Names of nodes and walks are those that published placements of this model use.
"""

from typing import Any, Final

from models.base import EngineKind, ModelGraph
from models.decoder_lm.graph import new_token_budget
from models.orpheus.frames import END_AUDIO, FIRST_AUDIO, SAMPLE_RATE, STRIDE_TOKENS, WINDOW_TOKENS
from shared.events import Params, Usage
from shared.plans import Chain, Finish, Join, Plan, PlanRequest, Start, SubPlan, Walk
from shared.walks import CLIENT, KEEP, Edge, Loop, Node, Stream, StreamingEdge, compile_walk
from shared.walks.chunks import SlidingWindow

DEFAULT_MAX_TOKENS: Final = 1200
"""As the makers' own package has it: 14 seconds of speech."""

VOICES: Final = ("tara", "leah", "jess", "leo", "dan", "mia", "zac", "zoe")
"""As published, the most natural first."""

SOUND: Final = StreamingEdge(
    "token",
    to="snac_decoder",
    chunks=SlidingWindow(WINDOW_TOKENS, STRIDE_TOKENS),
    after_end="stop",
    only=(FIRST_AUDIO, END_AUDIO),
)

PREPARE: Final = Node("prepare", inputs=(), outputs=(Edge("token_ids", to=KEEP),))
PREFILL: Final = Node("LLM", inputs=("token_ids",), outputs=(Edge("token", to=KEEP), SOUND))
DECODE: Final = Loop(
    "decode",
    Node("LLM", inputs=("token",), outputs=(Edge("token", to="LLM"), SOUND)),
    max_iters="max_tokens",
)
SNAC_CHUNK: Final = Loop(
    "chunks",
    Node("snac_decoder", inputs=(Stream("token"),), outputs=(Edge("audio", to=CLIENT("audio")),)),
    max_iters=None,
)


def plan(request: PlanRequest) -> Plan:
    """Prepare, check that it fits, then let SNAC listen while the language model speaks."""
    prepared = yield Walk("prepare", args={"inputs": request.inputs, "params": request.params})
    prompt_tokens: int = prepared.fact("prompt_tokens")
    args = _args(request, prompt_tokens, prepared.fact("sampling"))
    inputs = {"token_ids": prepared.handle("token_ids")}
    yield Start("speech", _speak())
    told = yield Chain(
        Walk("prefill", inputs=inputs, args=args | _asked(request.params)),
        Walk("decode", args=args),
        ends=("token",),
    )
    yield Join("speech")
    usage = Usage(prompt_tokens=prompt_tokens, completion_tokens=told.fact("completion_tokens"))
    return Finish(usage=usage, finish_reasons=(told.fact("finish_reason"),))


def _speak() -> SubPlan:
    """SNAC's part: one walk, for as long as there are tokens."""
    yield Walk("snac_chunk")


def _args(request: PlanRequest, prompt_tokens: int, sampling: dict[str, Any]) -> dict[str, Any]:
    limits = request.limits
    default = min(DEFAULT_MAX_TOKENS, limits.default_max_tokens)
    room = min(limits.max_seq_len, limits.kv_tokens) - prompt_tokens
    asked = request.params.max_tokens
    return {
        "max_tokens": new_token_budget(
            prompt_tokens, asked if asked is not None else max(1, min(default, room)), limits
        ),
        "sampling": sampling,
        "ignore_eos": request.params.ignore_eos,
    }


def _asked(params: Params) -> dict[str, Any]:
    """What a row is told only when it was asked for."""
    asked: dict[str, Any] = {}
    if params.stop_token_ids:
        asked["stop_token_ids"] = params.stop_token_ids
    if params.choice:
        asked["choice"] = params.choice
    return asked


GRAPH: Final = ModelGraph(
    family="orpheus",
    nodes={"prepare": EngineKind.CPU, "LLM": EngineKind.KV, "snac_decoder": EngineKind.STATELESS},
    walks={
        "prepare": compile_walk("prepare", PREPARE),
        "prefill": compile_walk("prefill", PREFILL),
        "decode": compile_walk("decode", DECODE),
        "snac_chunk": compile_walk("snac_chunk", SNAC_CHUNK),
    },
    plan=plan,
    media={"audio": {"sample_rate": SAMPLE_RATE, "num_channels": 1, "format": "pcm_s16le"}},
    repository="canopylabs/orpheus-3b-0.1-ft",
    former_walks=frozenset({"decode_llm", "audio_gen"}),
    voices=VOICES,
    kwargs=frozenset({"snac"}),
    paths=frozenset({"snac"}),
)
