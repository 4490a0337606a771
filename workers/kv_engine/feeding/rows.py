"""The rows of one fed sequence: an embedding for each token of its prompt, and for each generated one.

The rows are the parts of the sequence's prompt (`workers.kv_engine.prompt_parts`) which go on after the
prompt, so a step takes them as it takes the rows of images.
"""

from collections.abc import Sequence as Items
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from models.sequence_request import PromptPart
from workers.kv_engine.prompt_parts import Positions, PromptParts

_GROWTH: Final = 64
"""The fewest rows that a buffer grows by."""


class FedRows(PromptParts):
    """The rows of a sequence, on the node's device.

    Args:
        prompt_ids: the T token ids of the prompt.
        positions: (axes, T), of the type of the node's.
        next_position: the position of the token after the prompt.
        rows: (T, hidden).
    """

    def __init__(
        self,
        prompt_ids: Items[int],
        *,
        positions: Positions,
        next_position: float,
        rows: torch.Tensor,
    ) -> None:
        super().__init__(
            prompt_ids,
            [PromptPart(start=0, count=len(prompt_ids), digest="fed")],
            positions=positions,
            next_position=next_position,
            rows=rows,
        )
        self.count = len(rows)
        self._buffer = rows

    def append(self, row: torch.Tensor) -> None:
        """Add the row of the next token, (hidden,)."""
        if self.count == len(self._buffer):
            grown = self._buffer.new_empty(self.count + max(self.count, _GROWTH), *self._buffer.shape[1:])
            grown[: self.count] = self._buffer
            self._buffer = self.rows = grown
        self._buffer[self.count] = row
        self.count += 1

    def rows_in(self, start: int, count: int) -> tuple[slice, npt.NDArray[np.int64]]:
        return slice(start, start + count), np.arange(count)

    def changes(self, start: int, count: int) -> bool:
        return True
