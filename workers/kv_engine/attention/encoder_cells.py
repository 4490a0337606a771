"""Cells of an encoder's frames before those of a text: attention of encoder-decoder models in one pool.

    cell of a sequence   0 ... F-1                            F ...
    it holds             keys and values of a frame,          keys and values of a token,
                         for the cross-attention              for the self-attention

A token attends twice in each layer: to its own sequence from cell F on, and to the cells before it. The
frames themselves do not attend: their keys and values follow from the encoder's states alone. Both kinds have
the same shape, so a context is one sequence, and forks, reservations and block tables know nothing of it.

Spans of frames are told by their route (`models.programs.FRAME_ROUTE`). Positions count from the first token
of the text, so F is the difference between a token's cell and its position: each sequence has its own. Where
it is 0 there are no frames, as in the self-check at load: such a text is decoded without cross-attention.
"""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch

from models.programs import FRAME_ROUTE
from workers.kv_engine.attention.span_groups import Group, group_spans
from workers.kv_engine.step import Step


@dataclass(frozen=True, slots=True)
class EncoderGroups:
    """The groups of a step's text.

    Attributes:
        own: for self-attention.
        crossed: for cross-attention.
    """

    own: list[Group]
    crossed: list[Group]

    @classmethod
    def of(cls, step: Step, like: torch.Tensor) -> Self:
        """Group the spans of a step.

        Args:
            step: its spans are either frames or text.
            like: a tensor of the pool: its device and dtype.
        """
        spans, device, dtype = step.spans, like.device, like.dtype
        firsts, counts = spans.query_offsets[:-1], np.diff(spans.query_offsets)
        is_text = np.ones(len(counts), bool)
        if step.routes is not None:
            is_text = step.routes.cpu().numpy()[firsts] != FRAME_ROUTE
        before = spans.kv_lengths - counts - step.positions.cpu().numpy()[firsts]
        # Below 0: a text of the self-check, which shifts positions.
        frames = np.where(is_text, before, 0).clip(min=0).astype(np.int32)
        own = replace(spans, first_keys=frames)
        crossed = replace(
            spans, kv_lengths=frames, key_ends=np.repeat(frames, counts), full_starts=None, first_keys=None
        )
        text, behind = np.flatnonzero(is_text).tolist(), np.flatnonzero(frames).tolist()
        return cls(
            own=group_spans(own, device=device, dtype=dtype, among=text),
            crossed=group_spans(crossed, device=device, dtype=dtype, among=behind),
        )
