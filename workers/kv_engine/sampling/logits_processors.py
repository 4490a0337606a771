"""What changes logits before a token is chosen from them, in the order in which it is done.

    logit bias            is added
    repetition penalty    divides what is positive and multiplies what is negative, once per token that is
                          in the prompt or was generated (as transformers' processor)
    presence, frequency   are subtracted once, and for each time, a token was generated (as OpenAI has it)
    bans                  set minus infinity: a token that would complete a bad word; before `min_tokens`,
                          one that would end the answer

A row says something of few tokens, so it is told as a short list of them: their logits are gathered,
changed and put back, and a row of 150k logits costs what its list does. Nothing is drawn here, and nothing
is kept: what a row says of its tokens is in `workers.kv_engine.sampling.sampling_state`.
"""

from dataclasses import dataclass
from typing import Final

import torch

IN_PROMPT: Final = 1
"""The prompt has the token."""
BANNED: Final = 2
"""It is a bad word by itself."""
HELD: Final = 4
"""It would end the answer too early."""
COMPLETES: Final = 8
"""It would complete a bad word now."""
ONCE: Final = 16
"""Added for each time it was generated: the bits from here on count."""

_BANS: Final = BANNED | HELD | COMPLETES
_COUNT_SHIFT: Final = ONCE.bit_length() - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitAdjustments:
    """What A of the step's S sampled rows say of up to N tokens each.

    A row that says something of fewer repeats its first token: what is the same is put back twice.
    """

    rows: torch.Tensor  # (A,) int64, of the S sampled rows
    ids: torch.Tensor  # (A, N) int64
    facts: torch.Tensor  # (A, N) int32, the bits above
    bias: torch.Tensor  # (A, N) float32
    repetition: torch.Tensor  # (A, 1) float32
    presence: torch.Tensor  # (A, 1) float32
    frequency: torch.Tensor  # (A, 1) float32


def adjust(logits: torch.Tensor, rows: LogitAdjustments) -> None:
    """Change the logits, (S, V) float32, in place."""
    places = (rows.rows[:, None], rows.ids)
    found = logits[places] + rows.bias
    counts = rows.facts >> _COUNT_SHIFT
    was_generated = counts > 0
    is_repeated = was_generated | (rows.facts & IN_PROMPT).bool()
    penalised = torch.where(found < 0, found * rows.repetition, found / rows.repetition)
    found = torch.where(is_repeated, penalised, found)
    found -= was_generated * rows.presence + counts * rows.frequency
    found.masked_fill_((rows.facts & _BANS).bool(), -torch.inf)
    logits[places] = found
