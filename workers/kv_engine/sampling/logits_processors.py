"""Adjustments of logits before sampling, in this order.

    logit bias            is added
    repetition penalty    divides positive logits and multiplies negative ones, of tokens that are in the
                          prompt or were generated (as in transformers)
    presence, frequency   are subtracted from generated tokens, once and once per occurrence (as in OpenAI)
    length decay          raises end-of-sequence tokens after a number of tokens, more with each (as in
                          transformers' `exponential_decay_length_penalty`)
    bans                  set minus infinity: tokens that would complete a bad word, and before `min_tokens`
                          those that would end the answer

A row adjusts few tokens, so it is given as a short list of them: their logits are gathered, changed and
written back, and the cost depends on that list and not on the 150k logits of the row. This module is
stateless; `workers.kv_engine.sampling.sampling_state` keeps the lists.
"""

from dataclasses import dataclass
from typing import Final

import torch

IN_PROMPT: Final = 1
"""The token is in the prompt."""
BAD_WORD: Final = 2
"""The token is a bad word by itself."""
EARLY_END: Final = 4
"""The token would end the answer before `min_tokens`."""
ENDS_BAD_WORD: Final = 8
"""The token would complete a bad word now."""
ENDS: Final = 16
"""The token is an end of sequence, and subject to the decay of the length."""
COUNT_ONE: Final = 32
"""Added once per occurrence in the answer: the bits from here on are a counter."""

_BANS: Final = BAD_WORD | EARLY_END | ENDS_BAD_WORD
_COUNT_SHIFT: Final = COUNT_ONE.bit_length() - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitAdjustments:
    """The adjustments of A of the step's S sampled rows, of up to N tokens each.

    A row with fewer tokens repeats its first one, which then is written twice with the same value.
    """

    rows: torch.Tensor  # (A,) int64, of the S sampled rows
    ids: torch.Tensor  # (A, N) int64
    marks: torch.Tensor  # (A, N) int32, the bits above
    bias: torch.Tensor  # (A, N) float32
    repetition: torch.Tensor  # (A, 1) float32
    presence: torch.Tensor  # (A, 1) float32
    frequency: torch.Tensor  # (A, 1) float32
    growth: torch.Tensor  # (A, 1) float32, of end-of-sequence tokens


def adjust(logits: torch.Tensor, rows: LogitAdjustments) -> None:
    """Adjust the logits, (S, V) float32, in place."""
    places = (rows.rows[:, None], rows.ids)
    found = logits[places] + rows.bias
    counts = rows.marks >> _COUNT_SHIFT
    was_generated = counts > 0
    is_repeated = was_generated | (rows.marks & IN_PROMPT).bool()
    penalised = torch.where(found < 0, found * rows.repetition, found / rows.repetition)
    found = torch.where(is_repeated, penalised, found)
    found -= was_generated * rows.presence + counts * rows.frequency
    # A token that the model itself excludes, by minus infinity, stays excluded.
    grows = (rows.marks & ENDS).bool() & found.isfinite()
    found = torch.where(grows, found + found.abs() * rows.growth, found)
    found.masked_fill_((rows.marks & _BANS).bool(), -torch.inf)
    logits[places] = found
