"""Graph and plan of rerankers.

    score    texts and queries -> token ids -> a score of each text    CPU node `prepare`, node `scorer`

All pairs of a request are one walk, and the scorer packs those of all waiting requests.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Final

import msgspec

from models.base import SCORE, EngineKind, ModelGraph
from models.checkpoints.claims import CheckpointInfo, Claim
from models.text.embedding import modules_of
from models.text_encoder.requests import one_walk
from shared.plans import Plan, PlanRequest
from shared.walks import CLIENT, Edge, Node, Sequential, compile_walk

PREPARE: Final = "prepare"
SCORER: Final = "scorer"
_PREPARED: Final = ("tokens", "types", "lengths")
SCORE_WALK: Final = Sequential(
    Node(PREPARE, (), [Edge(name, to=SCORER) for name in _PREPARED]),
    Node(SCORER, _PREPARED, [Edge(SCORE, to=CLIENT(SCORE), on_resume="keep")]),
)
CLASSIFIER: Final = "ForSequenceClassification"
LANGUAGE_MODEL: Final = "ForCausalLM"
_JUDGES: Final = "LogitScore"
"""The module of a sentence-transformers folder that compares the logits of two tokens."""


class RerankerOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Options of scores.

    Attributes:
        instruction: what makes a text relevant, for language models. Default: the folder's prompt, or that of
            Qwen3-Reranker, a web search.
        use_activation: put the checkpoint's activation on the scores, mostly a sigmoid. Without it they are
            the raw numbers.
    """

    OTHER_NAMES: ClassVar[dict[str, str]] = {"activation": "use_activation", "instruct": "instruction"}
    instruction: str | None = None
    use_activation: bool = True


def plan(request: PlanRequest) -> Plan:
    """One walk, whose output is a score of each text, float32."""
    return (yield from one_walk("score", request))


def is_qwen(config: Mapping[str, Any]) -> bool:
    """Return true for the class of Qwen3-Reranker, whose prompt is known."""
    return config.get("architectures") == ["Qwen3ForCausalLM"]


def claims(checkpoint: CheckpointInfo) -> Claim | None:
    """Claim classifiers of texts, and language models that judge: the modules say it, or the folder's name.

    Nothing in the published files of Qwen3-Reranker tells it from a Qwen3.
    """
    if checkpoint.architecture.endswith(CLASSIFIER):
        return Claim.ARCHITECTURE
    if not checkpoint.architecture.endswith(LANGUAGE_MODEL):
        return None
    kinds = {module.kind for module in modules_of(checkpoint.folder)}
    is_named = not kinds and is_qwen(checkpoint.config) and "reranker" in checkpoint.folder.name.lower()
    return Claim.CHECKPOINT if _JUDGES in kinds or is_named else None


GRAPH: Final = ModelGraph(
    family="reranker",
    nodes={PREPARE: EngineKind.CPU, SCORER: EngineKind.STATELESS},
    walks={"score": compile_walk("score", SCORE_WALK)},
    plan=plan,
    options=RerankerOptions,
    takes_texts=True,
    max_positions=512,
    claims=claims,
    repository="cross-encoder/ms-marco-MiniLM-L6-v2",
    serves="rerankers: cross-encoders (...ForSequenceClassification with one label), Qwen3-Reranker",
)
