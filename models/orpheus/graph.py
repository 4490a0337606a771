"""Graph and plan of Orpheus, text to speech.

    prepare      a text and a voice -> token ids                                    a CPU node
    prefill      token ids -> the first new token                                   the KV node
    decode       a resident loop: token -> next token, until the speech ends        the KV node
    snac_chunk   a loop: a window of audio tokens -> samples                        the stateless node

Two partitions run at the same time: the language model, and SNAC. They are joined by a stream: the audio
tokens of prefill and decode in order, cut into windows of four frames, each one frame further. SNAC's walk
ends with the chunk that is marked as the last.

The names of nodes and walks are those of published placements of this model.
"""

from typing import Final

import msgspec

from models.base import EngineKind, ModelGraph
from models.checkpoints.claims import CheckpointInfo, Claim
from models.decoder_lm.graph import new_token_budget
from models.orpheus.frames import END_AUDIO, FIRST_AUDIO, SAMPLE_RATE, STRIDE_TOKENS, WINDOW_TOKENS
from models.sequence_request import PreparedPrompt, PrepareRequest, SequenceFacts, SequenceRequest
from shared.events import Usage
from shared.plans import Chain, Join, Plan, PlanRequest, Start, SubPlan, Walk
from shared.walks import CLIENT, KEEP, Edge, Loop, Node, StreamingEdge, StreamInput, compile_walk
from shared.walks.chunks import SlidingWindow

DEFAULT_MAX_TOKENS: Final = 1200
"""The default of the package `orpheus-speech`: 14 seconds of speech."""

VOICES: Final = ("tara", "leah", "jess", "leo", "dan", "mia", "zac", "zoe", "julia")
"""In the published order, the most natural first; and one that other servers of the model list."""

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
    Node("snac_decoder", inputs=(StreamInput("token"),), outputs=(Edge("audio", to=CLIENT("audio")),)),
    max_iters=None,
)


def plan(request: PlanRequest) -> Plan:
    """Prepare the prompt, check that it fits, then run the language model and SNAC at the same time."""
    step = yield Walk("prepare", args=PrepareRequest(inputs=request.inputs, params=request.params))
    prepared = step.facts_as(PreparedPrompt)
    decode = _decode_args(request, prepared)
    prefill = msgspec.structs.replace(
        decode, stop_token_ids=request.params.stop_token_ids, choice=request.params.choice
    )
    yield Start("speech", _speech())
    answer = yield Chain(
        Walk("prefill", inputs={"token_ids": step.handle("token_ids")}, args=prefill),
        Walk("decode", args=decode),
        ends=("token",),
    )
    yield Join("speech")
    facts: SequenceFacts = answer.facts_as(SequenceFacts)
    usage = Usage(prompt_tokens=prepared.prompt_tokens, completion_tokens=facts.completion_tokens)
    return facts.finish(usage)


def _speech() -> SubPlan:
    """SNAC's sub-plan: one walk, which runs until the stream of audio tokens ends."""
    yield Walk("snac_chunk")


def _decode_args(request: PlanRequest, prepared: PreparedPrompt) -> SequenceRequest:
    limits, max_tokens = request.limits, request.params.max_tokens
    if max_tokens is None:
        room = min(limits.max_seq_len, limits.kv_tokens) - prepared.prompt_tokens
        max_tokens = max(1, min(DEFAULT_MAX_TOKENS, limits.default_max_tokens, room))
    return SequenceRequest(
        max_tokens=new_token_budget(prepared.prompt_tokens, max_tokens, limits),
        sampling=prepared.sampling,
        ignore_eos=request.params.ignore_eos,
    )


def claims(checkpoint: CheckpointInfo) -> Claim | None:
    """Claim a Llama with a SNAC checkpoint in its folder, or with Orpheus' special tokens."""
    if checkpoint.architecture != "LlamaForCausalLM":
        return None
    if checkpoint.has("snac/config.json"):
        return Claim.CHECKPOINT
    added = checkpoint.read_json("tokenizer_config.json").get("added_tokens_decoder")
    end_of_speech = added.get("128258") if isinstance(added, dict) else None
    is_marked = isinstance(end_of_speech, dict) and end_of_speech.get("content") == "<custom_token_2>"
    return Claim.CHECKPOINT if is_marked else None


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
    claims=claims,
    serves="Orpheus' speech models",
    kwargs=frozenset({"snac"}),
    paths=frozenset({"snac"}),
)
