"""The torch nodes of Qwen3-VL: `llm`, and `vision_encoder`, whose deeper features enter the first layers.

A row has the embedding of a token, followed by what is added to its states after each of the first layers.
"""

from collections.abc import Sequence
from typing import Any, Final

import torch

from models.base import TokenStep
from models.vision_language.axes import GridDecoder
from models.vision_language.nodes import examine, loader
from models.vision_language.tower import VisionEncoder
from models.vision_language.visuals import Visual

__all__ = ["Qwen3VLDecoder", "Qwen3VLEncoder", "examine", "load"]


class Qwen3VLEncoder(VisionEncoder):
    """A tower over the patches of images and videos: its features, and those of inner layers beside them."""

    def encode(self, pixels: torch.Tensor, visuals: Sequence[Visual]) -> Sequence[torch.Tensor]:
        grids = torch.tensor([visual.grid for visual in visuals], device=pixels.device)
        found = self.model.model.get_image_features(pixels.flatten(0, 1), grids)
        layers = [found.pooler_output, *found.deepstack_features]
        return [torch.cat(of_one, dim=-1) for of_one in zip(*layers, strict=True)]


class Qwen3VLDecoder(GridDecoder):
    """Qwen3 with rows that are added to the states after its first layers."""

    def __init__(self, model: Any, **kwargs: Any) -> None:
        super().__init__(model, **kwargs)
        self._added: Final = len(model.config.vision_config.deepstack_visual_indexes)
        self.embed_width *= 1 + self._added

    def splice(self, token_ids: torch.Tensor, rows: torch.Tensor, at: torch.Tensor) -> Any:
        hidden = self.embed_width // (1 + self._added)
        embeds = super().splice(token_ids, rows[:, :hidden], at)
        added = rows[:, hidden:].to(embeds.dtype)
        return embeds, at, torch.split(added, hidden, dim=1)

    def forward(self, inputs: Any, step: TokenStep) -> torch.Tensor:
        if isinstance(inputs, torch.Tensor):
            return super().forward(inputs, step)
        embeds, at, added = inputs
        mask = torch.zeros(1, len(embeds), dtype=torch.bool, device=embeds.device)
        mask[0, at] = True
        hidden: torch.Tensor = self.text_model(
            inputs_embeds=embeds[None],
            position_ids=step.positions.unsqueeze(-2),
            attention_mask=self._no_mask,
            use_cache=False,
            visual_pos_masks=mask,
            deepstack_visual_embeds=added,
        ).last_hidden_state[0]
        return hidden


load: Final = loader(Qwen3VLEncoder, Qwen3VLDecoder)
