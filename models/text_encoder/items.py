"""Items of nodes that pack the texts of several requests: their cost, and their division into texts."""

from itertools import islice
from typing import Final

import torch

from models.base import Item

BATCH_TOKENS: Final = 16_384
"""The most tokens of the requests of one call, unless a single request has more."""


class CostsTokens:
    """The bounds of a stateless node (`models.base.StatelessNode`) whose work is that of its items' tokens.

    The input `tokens` of an item has those of all its texts.
    """

    max_batch = 256
    max_cost = BATCH_TOKENS

    def cost(self, item: Item) -> float:
        """The number of tokens of a request."""
        return item.inputs["tokens"].numel()


def divided(values: torch.Tensor, lengths: torch.Tensor) -> list[list[int]]:
    """Divide values, (T,), one for each token, among texts of so many tokens, (texts,)."""
    rest = iter(values.tolist())
    return [[*islice(rest, length)] for length in lengths.tolist()]
