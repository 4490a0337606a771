"""The torch nodes of V-JEPA 2: transformers' own encoder and masked predictor."""

from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import VJEPA2Model

from models.base import Item, StatelessResult
from models.encoder_cache import EncoderCache
from models.transformers_lm.parts import load_part
from models.vjepa2.graph import ROLLOUT

AHEAD_SECONDS, FRAMES_PER_SECOND, PREDICTED_FRAMES = 1.0, 4, 2
"""A rollout predicts so many frames, so far behind the clip, whose frames are taken at this rate."""


def load(checkpoint: Path, node: str, *, kwargs: Mapping[str, Any], **options: Any) -> "Encoder | Predictor":
    """Load one node of a checkpoint folder, see `load_part`; the family has no `kwargs` of its own."""
    kind = {"predictor": Predictor, ROLLOUT: Rollout}.get(node, Encoder)
    return kind(load_part(VJEPA2Model, "encoder" if kind is Encoder else "predictor", checkpoint, **options))


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


class Rollout(Predictor):
    """`features` (1, latents, width) -> `predicted`, and `features` whose first latents are replaced by them.

    Positions are counted from the first latent of the window, in each step again, as by `AnticipativeWrapper`
    (evals/action_anticipation_frozen of facebookresearch/vjepa2).
    """

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        config = model.config
        self._patches = (config.crop_size // config.patch_size) ** 2
        self._count = self._patches * (max(PREDICTED_FRAMES, config.tubelet_size) // config.tubelet_size)
        self._skipped = self._patches * int(AHEAD_SECONDS * FRAMES_PER_SECOND / config.tubelet_size)

    def run(self, items: Sequence[Item]) -> list[StatelessResult | Exception]:
        window = torch.cat([item.inputs["features"] for item in items])
        seen = torch.arange(window.shape[1], device=window.device).expand(len(items), -1)
        first = window.shape[1] + self._skipped
        wanted = torch.arange(first, first + self._count, device=window.device).expand(len(items), -1)
        rows = self._model(window.to(self._dtype), [seen], [wanted]).last_hidden_state.float()
        moved = torch.cat([window[:, self._count :], rows], dim=1)
        return [
            StatelessResult(outputs={"predicted": one[None], "features": kept[None]})
            for one, kept in zip(rows, moved, strict=True)
        ]
