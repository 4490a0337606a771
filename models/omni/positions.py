"""Positions on three axes, time, row and column, by transformers' own rules for thinker and talker."""

from collections.abc import Sequence
from typing import Any

import torch

from models.omni.films import has_film
from models.sequence_request import PromptPart


def omni_positions(
    model: Any,
    rules: Any,
    prompt_ids: Sequence[int],
    parts: Sequence[PromptPart],
    *,
    knows_films: bool = True,
) -> tuple[torch.Tensor, float]:
    """The positions of a prompt's T tokens, (3, T), and the position of the next token.

    They are of the type of the rule's: float32 where frames of a video may stand between whole numbers.

    Args:
        model: transformers' thinker or talker, which knows the tokens that stand for media.
        rules: the class of transformers that has `get_rope_index`; a part of the model may lack it.
        prompt_ids: the T token ids.
        parts: the media of the prompt. The grid of audio is the number of its frames.
        knows_films: the rule is told that videos have their sound among them.
    """
    # The parts of a film after the first of each modality have no grid.
    whole = [part for part in parts if part.grid]
    of = {kind: [part for part in whole if part.modality == kind] for kind in ("image", "video", "audio")}
    if not of["image"] and not of["video"]:
        count = len(prompt_ids)
        return torch.arange(count, dtype=torch.int32).repeat(3, 1), count
    found, _ = rules.get_rope_index(
        model,
        torch.tensor([prompt_ids]),
        image_grid_thw=_grids(of["image"]),
        video_grid_thw=_grids(of["video"]),
        attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.int64),
        use_audio_in_video=knows_films and has_film(parts),
        audio_seqlens=torch.tensor([part.grid[0] for part in of["audio"]]),
        second_per_grids=torch.tensor([part.seconds for part in of["video"]]),
    )
    positions: torch.Tensor = found[:, 0]
    return positions, positions.max().item() + 1


def _grids(parts: Sequence[PromptPart]) -> torch.Tensor | None:
    return torch.tensor([part.grid for part in parts]) if parts else None
