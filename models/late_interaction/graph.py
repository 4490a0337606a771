"""Graph and plan of late-interaction models.

    embed    texts -> token ids -> the vectors of each text
    score    queries and texts -> token ids -> the MaxSim of each text and its query

The CPU node is `prepare`; the node `encoder` packs the texts of all waiting requests.
"""

from typing import Final, Literal

import msgspec

from models.base import EMBEDDING, SCORE, VECTORS, EngineKind, ModelGraph
from models.checkpoints.claims import CheckpointInfo, Claim
from models.text.embedding import modules_of
from models.text_encoder.requests import one_walk
from shared.errors import ClientError
from shared.plans import Plan, PlanRequest
from shared.walks import CLIENT, Edge, Node, Sequential, compile_walk

PREPARE: Final = "prepare"
ENCODER: Final = "encoder"
EDGES: Final = ("tokens", "lengths", "kept")
STANFORD: Final = "HF_ColBERT"
"""The architecture of folders that the authors of ColBERT publish."""
_KINDS: Final = ("ColBERT", "MultiVectorEncoder")
"""Values of `model_type` in `config_sentence_transformers.json`."""


def _walk(*outputs: str) -> Sequential:
    return Sequential(
        Node(PREPARE, (), [Edge(name, to=ENCODER) for name in EDGES]),
        Node(ENCODER, [*EDGES], [Edge(name, to=CLIENT(name), on_resume="keep") for name in outputs]),
    )


class LateInteractionOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The kind of text that is embedded: queries and documents have other prefixes and lengths.

    Attributes:
        task: `query` or `document`; for embeddings only.
    """

    task: Literal["query", "document"] = "document"


def plan(request: PlanRequest) -> Plan:
    """One walk: `score` for a request with queries, else `embed`."""
    inputs = request.inputs
    if SCORE in inputs.output_modalities and not inputs.queries:
        raise ClientError("queries: expected one, or one for each text, to score them; found none")
    return (yield from one_walk("score" if inputs.queries else "embed", request))


def claims(checkpoint: CheckpointInfo) -> Claim | None:
    """Claim folders of ColBERT's authors, of PyLate, and of sentence-transformers' multi-vector encoders."""
    if checkpoint.architecture == STANFORD:
        return Claim.CHECKPOINT
    kinds = [module.kind for module in modules_of(checkpoint.folder)]
    if kinds[:1] != ["Transformer"] or "Pooling" in kinds:
        return None
    stated = checkpoint.read_json("config_sentence_transformers.json").get("model_type")
    return Claim.CHECKPOINT if stated in _KINDS or "MultiVectorMask" in kinds else None


GRAPH: Final = ModelGraph(
    family="late_interaction",
    nodes={PREPARE: EngineKind.CPU, ENCODER: EngineKind.STATELESS},
    walks={
        "embed": compile_walk("embed", _walk(EMBEDDING, VECTORS)),
        "score": compile_walk("score", _walk(SCORE)),
    },
    plan=plan,
    options=LateInteractionOptions,
    takes_texts=True,
    max_positions=512,
    claims=claims,
    repository="colbert-ir/colbertv2.0",
    serves="late interaction: folders of ColBERT, PyLate and sentence-transformers' multi-vector encoders",
)
