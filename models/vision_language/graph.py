"""Graph and plan of vision-language models, for all families of the kit.

    prepare         messages or text -> token ids                                  a CPU node
    prepare_media   the same with media -> token ids, pixels                       a CPU node
    prefill         token ids -> the first new token                               the KV node
    prefill_media   pixels -> rows; token ids and rows -> the first new token      tower, KV node
    decode          a resident loop: token -> next token, until the answer ends    the KV node
    score           token ids -> no new token                                      the KV node
    score_media     pixels -> rows; token ids and rows -> no new token             tower, KV node

A request without media runs the walks of `models.decoder_lm`: its rank needs no tower. The rows go from the
tower to the KV node within one walk, so they are freed as soon as the prompt is computed.
"""

from collections.abc import Collection
from functools import partial
from typing import Any, Final

import msgspec

from models.base import EngineKind, ModelGraph
from models.checkpoints.claims import CheckpointInfo, Claim
from models.decoder_lm.graph import DECODE, PREFILL, PREPARE, SCORE, Prompt, answer
from models.decoder_lm.graph import plan as plan_of_text
from models.sequence_request import PrepareRequest, SequenceRequest
from models.text import generation_config
from models.vision_language.visuals import MediaSequenceRequest, PreparedMedia
from shared.plans import Plan, PlanRequest, Walk
from shared.walks import CLIENT, KEEP, Edge, Node, Sequential, compile_walk

ENCODER: Final = "vision_encoder"
LLM: Final = "llm"

PREPARE_MEDIA: Final = Node(
    "prepare", inputs=(), outputs=(Edge("token_ids", to=KEEP), Edge("pixels", to=KEEP))
)
ENCODE: Final = Node(ENCODER, inputs=("pixels",), outputs=(Edge("embeds", to=LLM),))
PREFILL_MEDIA: Final = Sequential(
    ENCODE, Node(LLM, inputs=("token_ids", "embeds"), outputs=(Edge("token", to=CLIENT("text")),))
)
SCORE_MEDIA: Final = Sequential(ENCODE, Node(LLM, inputs=("token_ids", "embeds"), outputs=()))


def plan(request: PlanRequest) -> Plan:
    """Run a request without media as a language model's; one with media encodes them before the prefill."""
    if not request.inputs.files:
        return (yield from plan_of_text(request))
    step = yield Walk("prepare_media", args=PrepareRequest(inputs=request.inputs, params=request.params))
    prepared = step.facts_as(PreparedMedia)
    prompt = Prompt(
        prepared=prepared,
        inputs={"token_ids": step.handle("token_ids"), "pixels": step.handle("pixels")},
        start=partial(_with_media, prepared),
        prefill="prefill_media",
        score="score_media",
    )
    return (yield from answer(request, prompt))


def _with_media(prepared: PreparedMedia, request: SequenceRequest) -> SequenceRequest:
    """The arguments of the walk that starts a sequence, with the media of its prompt."""
    given: dict[str, Any] = {name: getattr(request, name) for name in request.__struct_fields__}
    return MediaSequenceRequest(**{**given, "parts": [*prepared.parts]}, visuals=prepared.visuals)


def vision_language_graph(
    family: str,
    architectures: Collection[str],
    *,
    serves: str,
    repository: str,
    modalities: tuple[str, ...] = ("text", "image"),
    options: type[msgspec.Struct] | None = None,
    max_positions: int | None = None,
) -> ModelGraph:
    """The graph of a family.

    Args:
        family: its name.
        architectures: the model classes that it claims, as `config.json` names them.
        serves: these checkpoints in words, for error messages.
        repository: a usual checkpoint on the Hugging Face hub.
        modalities: the input modalities.
        options: the family's own request parameters (`ModelGraph.options`).
        max_positions: the longest sequence of checkpoints that do not state it.
    """

    def claims(checkpoint: CheckpointInfo) -> Claim | None:
        return Claim.ARCHITECTURE if checkpoint.architecture in architectures else None

    return ModelGraph(
        family=family,
        nodes={"prepare": EngineKind.CPU, ENCODER: EngineKind.STATELESS, LLM: EngineKind.KV},
        walks={
            "prepare": compile_walk("prepare", PREPARE),
            "prepare_media": compile_walk("prepare_media", PREPARE_MEDIA),
            "prefill": compile_walk("prefill", PREFILL),
            "prefill_media": compile_walk("prefill_media", PREFILL_MEDIA),
            "decode": compile_walk("decode", DECODE),
            "score": compile_walk("score", SCORE),
            "score_media": compile_walk("score_media", SCORE_MEDIA),
        },
        plan=plan,
        modalities=modalities,
        options=options,
        repository=repository,
        embeds=True,
        max_positions=max_positions,
        claims=claims,
        serves=serves,
        remarks=lambda checkpoint, _: generation_config.remarks_of(checkpoint),
    )
