"""Classifier-free guidance: each step computes a second context, whose prompt is masked."""

from collections.abc import Sequence
from typing import Final

import torch

TEXT: Final = "text"
"""The context of an answer."""
FREE: Final = "free"
"""The context for guidance: the same answer behind a masked prompt."""


def contexts_of(prompt: Sequence[int], mask_id: int, *, is_guided: bool) -> list[tuple[str, Sequence[int]]]:
    """Return the contexts of an answer, each with its prompt."""
    own: list[tuple[str, Sequence[int]]] = [(TEXT, prompt)]
    return [*own, (FREE, [mask_id] * len(prompt))] if is_guided else own


def guided(logits: Sequence[torch.Tensor], scale: float) -> torch.Tensor:
    """Return `free + (scale + 1) (text - free)`, of the logits of both contexts; of one context its own.

    Args:
        logits: for each of `contexts_of`, (L, vocab).
        scale: of the guidance, w.
    """
    if len(logits) == 1:
        return logits[0]
    text, free = logits
    return free + (scale + 1) * (text - free)
