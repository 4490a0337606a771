"""The torch nodes of V-JEPA 2: transformers' own encoder and masked predictor."""

from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import VJEPA2Model

from models.base import Item, StatelessResult
from models.encoder_cache import EncoderCache
from models.transformers_lm.parts import load_part


def load(checkpoint: Path, node: str, *, kwargs: Mapping[str, Any], **options: Any) -> "Encoder | Predictor":
    """Load one node of a checkpoint folder, see `load_part`; the family has no `kwargs` of its own."""
    kind, part = (Predictor, "predictor") if node == "predictor" else (Encoder, "encoder")
    return kind(load_part(VJEPA2Model, part, checkpoint, **options))


class Predictor:
    """`features`, masks -> `predicted` (1, targets, width): one forward for inputs of equal shapes."""

    max_batch, max_cost = 8, 1 << 24

    def __init__(self, model: Any) -> None:
        self._model, self._dtype = model, next(model.parameters()).dtype

    def group(self, item: Item) -> Hashable:
        return tuple(tensor.shape for tensor in item.inputs.values())

    def cost(self, item: Item) -> float:
        return sum(tensor.numel() for tensor in item.inputs.values())

    def run(self, items: Sequence[Item]) -> list[StatelessResult | Exception]:
        features, *masks = (
            torch.cat([item.inputs[name] for item in items])
            for name in ("features", "context_mask", "target_mask")
        )
        rows = self._model(features.to(self._dtype), *([mask] for mask in masks)).last_hidden_state.float()
        return [StatelessResult(outputs={"predicted": one[None]}) for one in rows]


class Encoder(Predictor):
    """`pixels` -> `features` (1, latents, width), kept by the digest of the clip."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.encoder_cache = EncoderCache()

    def run(self, items: Sequence[Item]) -> list[StatelessResult | Exception]:
        def encode(new: Sequence[int]) -> Sequence[torch.Tensor]:
            pixels = torch.stack([items[index].inputs["pixels"] for index in new])
            rows: torch.Tensor = self._model(pixels.to(self._dtype)).last_hidden_state.float()
            return [one[None] for one in rows]

        keys = [(item.args["digest"], self.group(item)) for item in items]
        return [StatelessResult(outputs={"features": one}) for one in self.encoder_cache.fill(keys, encode)]
