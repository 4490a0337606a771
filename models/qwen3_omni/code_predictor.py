"""The code predictor: a small language model within each frame of speech, over the groups of its codes.

state of the talker, code 0 ──> code 1 ──> code 2 ──> ... ──> the last code
"""

from typing import Any, Final

import torch
from torch import nn
from transformers import DynamicCache

from models.feeding import Draw


class CodePredictor:
    """The loop over one frame, for all sequences of a step. Its keys and values live as long as the frame.

    Args:
        model: transformers' code predictor of Qwen3-Omni, or one with the same members. If it is narrower
            than the talker, it has a `small_to_mtp_projection` too.

    Attributes:
        groups: the number of codes of a frame.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._heads: Final = model.lm_head
        self._tables: Final = model.model.get_input_embeddings()
        self._narrowed: Final = getattr(model, "small_to_mtp_projection", nn.Identity())
        self.groups: Final[int] = len(model.lm_head) + 1

    def frame(
        self, tokens: torch.Tensor, hidden: torch.Tensor, rows: torch.Tensor, draw: Draw
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Predict the other codes of each frame.

        Args:
            tokens: (S,) int64, the first codes.
            hidden: (S, hidden), the states of the talker that they were sampled from.
            rows: (S, hidden), their embeddings.
            draw: chooses codes.

        Returns:
            All codes, (S, groups) int32, and the sum of their embeddings, (S, hidden).
        """
        cache = DynamicCache(config=self._model.config)
        codes, inputs = [tokens], torch.stack([hidden, rows], dim=1)
        for group in range(self.groups - 1):
            states = self._model.model(
                inputs_embeds=self._narrowed(inputs), past_key_values=cache, use_cache=True
            )
            code = draw(self._heads[group](states.last_hidden_state[:, -1]).float(), f"code {group + 1}")
            embeds = self._tables[group](code)
            rows = rows + embeds
            codes.append(code)
            inputs = embeds[:, None]
        return torch.stack(codes, dim=1).int(), rows
