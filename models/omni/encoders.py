"""The stateless node `audio_encoder`: sound to the rows that replace embeddings.

A row has the features of one token, and, with deepstack, those that are added to the states after the first
layers; sound has none of these, so the rest of its rows is zero. In a prompt with both kinds of media the
audio encoder gets the rows of the other one, and returns all rows in the order of the prompt.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import msgspec
import torch

from models.base import Item, StatelessResult
from models.sequence_request import PromptPart
from models.vision_language.tower import VisionEncoder
from models.vision_language.visuals import Visual


class AudioEncoder(VisionEncoder):
    """The tower over spectrograms.

    Args:
        model: the half of the thinker that has the tower.
        width: the numbers in a row of the thinker.
    """

    def __init__(self, model: Any, *, width: int) -> None:
        super().__init__(model)
        self._width: Final = width

    def cost(self, item: Item) -> float:
        """The number of numbers in the spectrograms of a request."""
        return item.inputs["audio_features"].numel()

    def encode(self, pixels: torch.Tensor, visuals: Sequence[Visual]) -> Sequence[torch.Tensor]:
        """The rows of spectrograms of equal shapes: (n, mels, frames) to n times (rows, width)."""
        count, _, frames = pixels.shape
        lengths = torch.full((count,), frames, device=pixels.device)
        packed = pixels.transpose(0, 1).flatten(1)
        found = self.model.model.audio_tower(packed, feature_lens=lengths).last_hidden_state
        rows = found.new_zeros(len(found), self._width)
        rows[:, : found.shape[1]] = found
        split: Sequence[torch.Tensor] = rows.split([visual.rows for visual in visuals])
        return split

    def run(self, items: Sequence[Item]) -> list[StatelessResult | Exception]:
        """Encode each item's `audio_features` of its `sounds` to `embeds`, with the given ones among them."""
        heard = super().run([_as_visuals(item) for item in items])
        return [
            _joined(item, result)
            if "embeds" in item.inputs and isinstance(result, StatelessResult)
            else result
            for item, result in zip(items, heard, strict=True)
        ]


def _as_visuals(item: Item) -> Item:
    """The item as the base class takes it."""
    return replace(
        item,
        args={**item.args, "visuals": item.args["sounds"]},
        inputs={"pixels": item.inputs["audio_features"]},
    )


def _joined(item: Item, heard: StatelessResult) -> StatelessResult:
    """The rows of sounds and of what was seen, in the order of the prompt."""
    parts = msgspec.convert(item.args["parts"], list[PromptPart])
    given: Mapping[bool, torch.Tensor] = {True: heard.outputs["embeds"], False: item.inputs["embeds"]}
    return StatelessResult(outputs={"embeds": torch.cat([*_in_order(parts, given)])})


def _in_order(parts: Iterable[PromptPart], rows: Mapping[bool, torch.Tensor]) -> Iterable[torch.Tensor]:
    begins = {True: 0, False: 0}
    for part in parts:
        is_sound = part.modality == "audio"
        begin = begins[is_sound]
        begins[is_sound] += part.count
        yield rows[is_sound][begin : begins[is_sound]]
