"""The node `scorer` of rerankers: packed token ids to a score of each pair."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch

from models.base import SCORE, Item, StatelessResult
from models.checkpoints.progress import Progress, silent
from models.reranker import folder
from models.reranker.folder import Activation
from models.reranker.graph import SCORER
from models.reranker.judging import answers_of
from models.reranker.scorers import Scorer, load_scorer
from models.reranker.token_types import has_types
from models.text.tokenizer import load_tokenizer
from models.text_encoder.items import CostsTokens, divided
from shared.errors import BugError

_ACTIVATIONS: Final[Mapping[Activation, Callable[[torch.Tensor], torch.Tensor]]] = {
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "identity": lambda scores: scores,
}


def load(
    checkpoint: Path,
    node: str = SCORER,
    *,
    device: str | torch.device = "cpu",
    dtype: str = "auto",
    progress: Progress = silent,
    kwargs: Mapping[str, Any] = MappingProxyType({}),
) -> "Reranker":
    """Load the model of a checkpoint folder in Hugging Face format; the family has no `kwargs` of its own.

    Raises:
        CheckpointError: a file of the folder is missing, damaged or unsupported.
    """
    if node != SCORER:
        raise BugError(f"reranker has no node {node!r} with weights; it has {SCORER!r}")
    settings = folder.read(checkpoint)
    answers = settings.answers
    if settings.is_judge and answers is None:
        answers = answers_of(load_tokenizer(checkpoint)[0])
    scorer = load_scorer(
        checkpoint,
        answers=answers,
        is_judge=settings.is_judge,
        device=device,
        dtype=dtype,
        progress=progress,
    )
    takes_types = not settings.is_judge and has_types(checkpoint)
    return Reranker(scorer, activation=settings.activation, takes_types=takes_types)


class Reranker(CostsTokens):
    """A stateless node (`models.base.StatelessNode`) that packs the pairs of all waiting requests."""

    def __init__(self, scorer: Scorer, *, activation: Activation, takes_types: bool) -> None:
        self.scorer: Final = scorer
        self._takes_types: Final = takes_types
        self._activation: Final = _ACTIVATIONS[activation]

    @torch.inference_mode()
    def run(self, items: Sequence[Item]) -> list[StatelessResult | Exception]:
        """Score the pairs of each item: (pairs,) float32."""
        counts = [item.inputs["lengths"].numel() for item in items]
        texts = _by_pair(items, "tokens")
        types = _by_pair(items, "types") if self._takes_types else None
        scores = torch.split(self.scorer.scores(texts, types), counts)
        return [
            StatelessResult(outputs={SCORE: self._activated(item, found)})
            for item, found in zip(items, scores, strict=True)
        ]

    def _activated(self, item: Item, scores: torch.Tensor) -> torch.Tensor:
        is_raw = item.args["params"].get("options", {}).get("use_activation") is False
        return scores.clone() if is_raw else self._activation(scores)


def _by_pair(items: Sequence[Item], name: str) -> list[list[int]]:
    """The token ids, or the types, of each pair of all items."""
    return [pair for item in items for pair in divided(item.inputs[name], item.inputs["lengths"])]
