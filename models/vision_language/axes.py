"""The KV node of models whose tokens have positions on three axes: time, row and column (Qwen's)."""

from collections.abc import Sequence

import torch

from models.sequence_request import PromptPart
from models.vision_language.decoder import VlmDecoder

_KINDS = {"image": 1, "video": 2}


class GridDecoder(VlmDecoder):
    """A language model with the positions of transformers' own `get_rope_index`."""

    position_axes = 3

    def positions(self, prompt_ids: Sequence[int], parts: Sequence[PromptPart]) -> tuple[torch.Tensor, float]:
        if not prompt_ids:
            return torch.zeros(3, 0, dtype=torch.int32), 0
        ids = torch.tensor([prompt_ids])
        kinds = torch.zeros_like(ids, dtype=torch.int32)
        for part in parts:
            kinds[0, part.start : part.start + part.count] = _KINDS[part.modality]
        of = {kind: [part for part in parts if part.modality == kind] for kind in _KINDS}
        grids = {kind: torch.tensor([part.grid for part in of[kind]]) if of[kind] else None for kind in of}
        found, _ = self.model.model.get_rope_index(
            ids,
            mm_token_type_ids=kinds,
            image_grid_thw=grids["image"],
            video_grid_thw=grids["video"],
            second_per_grid_ts=torch.tensor([part.seconds for part in of["video"]]),
        )
        positions: torch.Tensor = found[:, 0].to(torch.int32)
        return positions, int(positions.max()) + 1
