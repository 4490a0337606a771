"""The node `encoder` of late-interaction models: token ids to vectors of tokens, or to MaxSim scores."""

from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
from safetensors import safe_open
from torch.nn import functional

from models.base import EMBEDDING, SCORE, VECTORS, Item, StatelessResult
from models.checkpoints.files import CheckpointError
from models.checkpoints.progress import Progress, silent
from models.checkpoints.weights import read_shards
from models.late_interaction import folder
from models.late_interaction.folder import LateInteractionFolder
from models.late_interaction.graph import ENCODER
from models.text_encoder.backbone import load_model
from models.text_encoder.head import load_stage
from models.text_encoder.items import CostsTokens, divided
from models.text_encoder.packed import PackedEncoder
from shared.errors import BugError

_PROJECTION: Final = "linear.weight"
_STOCK: Final = "sdpa"


def load(
    checkpoint: Path,
    node: str = ENCODER,
    *,
    device: str | torch.device = "cpu",
    dtype: str = "auto",
    progress: Progress = silent,
    kwargs: Mapping[str, Any] = MappingProxyType({}),
) -> "LateInteractionEncoder":
    """Load the encoder of a folder; the family has no `kwargs` of its own.

    Raises:
        CheckpointError: a file of the folder is missing, damaged or unsupported.
    """
    if node != ENCODER:
        raise BugError(f"late_interaction has no node {node!r} with weights; it has {ENCODER!r}")
    settings = folder.read(checkpoint)
    model = load_model(checkpoint, device=device, dtype=dtype, progress=progress)
    if settings.stages:
        stages = [load_stage(checkpoint, stage) for stage in settings.stages]
    else:
        stages = [_projection(checkpoint)]
    for stage in stages:
        stage.to(model.device).eval().requires_grad_(requires_grad=False)
    return LateInteractionEncoder(model, stages, settings)


def _projection(checkpoint: Path) -> torch.nn.Linear:
    """The projection of a folder of ColBERT's authors, in float32.

    Raises:
        CheckpointError: the folder has none.
    """
    for shard in read_shards(checkpoint):
        if _PROJECTION in shard.tensors:
            with safe_open(shard.path, framework="pt") as file:
                weight = file.get_tensor(_PROJECTION).float()
            linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
            linear.load_state_dict({"weight": weight})
            return linear
    raise CheckpointError(f"{checkpoint}: expected the projection {_PROJECTION} among the weights")


class LateInteractionEncoder(CostsTokens):
    """A stateless node (`models.base.StatelessNode`) that packs the texts of all waiting requests."""

    def __init__(
        self, model: Any, stages: Sequence[torch.nn.Module], settings: LateInteractionFolder
    ) -> None:
        self._expanded = ExpandedTexts(model)
        self._encoder = PackedEncoder(model)
        self._stages = stages
        self._settings = settings

    @torch.inference_mode()
    def run(self, items: Sequence[Item]) -> list[StatelessResult | Exception]:
        """Vectors of each item's texts, one text behind the other, and their numbers; or scores, (texts,)."""
        texts: list[list[int]] = []
        seen: list[int] = []
        for item in items:
            lengths, visible = item.inputs["lengths"].unbind(1)
            texts += divided(item.inputs["tokens"], lengths)
            seen += visible.tolist()
        states = iter(self._states(texts, seen))
        return [self._result(item, [*islice(states, len(item.inputs["lengths"]))]) for item in items]

    def _states(self, texts: Sequence[list[int]], seen: Sequence[int]) -> list[torch.Tensor]:
        found: dict[int, torch.Tensor] = {}
        plain = [index for index, text in enumerate(texts) if seen[index] == len(text)]
        others = [index for index, text in enumerate(texts) if seen[index] != len(text)]
        found |= dict(zip(plain, self._encoder.states([texts[index] for index in plain]), strict=True))
        expanded = self._expanded.states(
            [texts[index] for index in others], [seen[index] for index in others]
        )
        found |= dict(zip(others, expanded, strict=True))
        return [found[index] for index in range(len(texts))]

    def _result(self, item: Item, states: Sequence[torch.Tensor]) -> StatelessResult:
        kept = torch.split(item.inputs["kept"].bool(), [len(one) for one in states])
        vectors = [self._vectors(one[mask]) for one, mask in zip(states, kept, strict=True)]
        queries = len(item.args["inputs"].get("queries", ()))
        if queries:
            return StatelessResult(outputs={SCORE: self._scores(vectors[:queries], vectors[queries:])})
        counts = torch.tensor([len(one) for one in vectors], dtype=torch.int32, device=vectors[0].device)
        return StatelessResult(outputs={EMBEDDING: torch.cat(vectors), VECTORS: counts})

    def _vectors(self, states: torch.Tensor) -> torch.Tensor:
        """The vectors of tokens, (tokens, size) float32."""
        found = states.float()
        for stage in self._stages:
            found = stage(found)
        return functional.normalize(found, dim=-1) if self._settings.is_normalized else found

    def _scores(self, queries: Sequence[torch.Tensor], texts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The score of each text against its query, or against the only one, (texts,)."""
        of_texts = [*queries] * len(texts) if len(queries) == 1 else queries
        return torch.stack(
            [
                max_sim(query, text, averages=self._settings.averages)
                for query, text in zip(of_texts, texts, strict=True)
            ]
        )


def max_sim(query: torch.Tensor, text: torch.Tensor, *, averages: bool = False) -> torch.Tensor:
    """The sum, or the mean, over a query's vectors of the largest product with a vector of the text."""
    if not len(text):
        return query.new_zeros(())
    best: torch.Tensor = (query @ text.T).amax(1)
    return best.mean() if averages else best.sum()


class ExpandedTexts:
    """Texts whose last tokens are seen by no token, as the mask tokens of a query usually are.

    Texts of equal length are computed together by transformers' own attention under a mask.
    """

    def __init__(self, model: Any) -> None:
        self._model = model.base_model

    def states(self, texts: Sequence[list[int]], seen: Sequence[int]) -> list[torch.Tensor]:
        """The states of texts, (tokens, hidden) each, of which the first `seen` tokens are visible."""
        alike: dict[int, list[int]] = {}
        for index, text in enumerate(texts):
            alike.setdefault(len(text), []).append(index)
        found: dict[int, torch.Tensor] = {}
        packed = self._model.config._attn_implementation  # noqa: SLF001 - no public reader
        try:
            if packed != _STOCK and texts:
                self._model.set_attn_implementation(_STOCK)
            for length, group in alike.items():
                rows = self._forward(
                    [texts[index] for index in group], [seen[index] for index in group], length
                )
                found |= dict(zip(group, rows, strict=True))
        finally:
            if packed != _STOCK and texts:
                self._model.set_attn_implementation(packed)
        return [found[index] for index in range(len(texts))]

    def _forward(self, texts: Sequence[list[int]], seen: Sequence[int], length: int) -> torch.Tensor:
        device = self._model.device
        visible = torch.arange(length, device=device) < torch.tensor(seen, device=device)[:, None]
        states: torch.Tensor = self._model(
            input_ids=torch.tensor([*texts], device=device), attention_mask=visible.long()
        ).last_hidden_state
        return states
