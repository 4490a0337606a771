"""Longrope: rotary angles with short factors for short texts, and with long factors for long ones.

Transformers chooses the factors of a whole batch by its largest position: the long ones for texts of more
than `original_max_position_embeddings` tokens (`dynamic_rope_update` in `modeling_rope_utils`). When a text
grows past that length, `generate` of some architectures drops its cache and computes all keys again
(`prepare_inputs_for_generation`, for example of Phi3). So the keys of a text have either factors, never both.

`LongFactors` makes the same choice for each token of a packed batch. The engine says which tokens belong to
long texts (`TokenStep.long_factors`), and computes the keys of a text again when it grows past the change.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.nn.functional import pad

from models.checkpoints.files import RECOMPUTED_AT_CHANGE


def rotary_change_of(architecture: str, config: Any) -> int | None:
    """The length of the longest text with short factors, in tokens; None for a model without long factors.

    It is None, too, for an architecture whose `generate` keeps keys of both kinds: its texts are limited to
    the short factors (`models.checkpoints.files.context_length`).

    Args:
        architecture: the name of the model class.
        config: its config.
    """
    rope: Any = getattr(config, "rope_parameters", None) or {}
    if architecture not in RECOMPUTED_AT_CHANGE or rope.get("rope_type") != "longrope":
        return None
    change: int = rope["original_max_position_embeddings"]
    return change


class LongFactors:
    """Replaces the forward of a rotary embedding by one that chooses the factors for each token.

    Args:
        rotary: the module of transformers: a hidden state and positions, (1, T), to cos and sin, (1, T, D).
        change: the length of the longest text with short factors, in tokens.
    """

    def __init__(self, rotary: Any, change: int) -> None:
        self._change: Final = change
        self._stock: Final = rotary.forward
        self._tokens: torch.Tensor | None = None
        rotary.forward = self._forward

    @contextmanager
    def of(self, tokens: torch.Tensor | None) -> Iterator[None]:
        """Choose by `tokens`, (T,), 1 for those of long texts; None: transformers chooses for the batch."""
        self._tokens = tokens
        try:
            yield
        finally:
            self._tokens = None

    def _forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self._tokens is None:
            found: tuple[torch.Tensor, ...] = self._stock(x, position_ids=position_ids)
            return found
        is_long = self._tokens.bool()
        # Transformers' own code computes both, so factors and scaling are its own. Without the positions of
        # long texts it chooses short factors, and with one position after the change long ones. No branch
        # reads a value, because a recorded step has none.
        of_short = self._stock(x, position_ids=position_ids.masked_fill(is_long, 0))
        of_long = self._stock(x, position_ids=pad(position_ids, (0, 1), value=self._change))
        return tuple(
            torch.where(is_long[:, None], long[..., :-1, :], short)
            for short, long in zip(of_short, of_long, strict=True)
        )
