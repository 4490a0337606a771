"""Cells of an encoder's frames before those of a text: attention of encoder-decoder models in one pool.

    cell of a sequence   0 ... F-1                            F ...
    it holds             keys and values of a frame,          keys and values of a token,
                         for the cross-attention              for the self-attention

A token attends twice in each layer: to its own sequence from cell F on, and to the cells before it. The
frames themselves do not attend: their keys and values follow from the encoder's states alone. Both kinds have
the same shape, so a context is one sequence, and forks, reservations and block tables know nothing of it.

Spans of frames are told by their route (`models.programs.FRAME_ROUTE`). A sequence that is not longer than F
has no frames, as the text of the self-check at load: it is decoded without cross-attention.
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
    def of(cls, step: Step, frames: int, like: torch.Tensor) -> Self:
        """Group the spans of a step.

        Args:
            step: its spans are either frames or text.
            frames: F, the number of an encoder's frames.
            like: a tensor of the pool: its device and dtype.
        """
        spans, device, dtype = step.spans, like.device, like.dtype
        is_text = np.ones(len(spans.kv_lengths), bool)
        if step.routes is not None:
            is_text = step.routes.cpu().numpy()[spans.query_offsets[:-1]] != FRAME_ROUTE
        is_behind = is_text & (spans.kv_lengths > frames)
        own = replace(spans, first_keys=np.where(is_behind, frames, 0).astype(np.int32))
        crossed = replace(
            spans,
            kv_lengths=np.full_like(spans.kv_lengths, frames),
            key_ends=np.full(spans.query_offsets[-1], frames, np.int32),
            full_starts=None,
        )
        text, behind = np.flatnonzero(is_text).tolist(), np.flatnonzero(is_behind).tolist()
        return cls(
            own=group_spans(own, device=device, dtype=dtype, among=text),
            crossed=group_spans(crossed, device=device, dtype=dtype, among=behind),
        )
