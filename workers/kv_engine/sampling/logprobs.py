"""Log probabilities of tokens by the model's own logits, before temperature and filters.

A log-softmax in float32 over the whole vocabulary, only for the rows that report it. It is computed in slices
of rows, so a long prompt needs no more memory than a short one. A few numbers per token are copied to the
host, in one transfer; on a GPU nothing waits for it before the scores are read.

Of equal logits the lower id is the likelier token, as for the greedy choice.
"""

from collections.abc import Callable, Iterator
from typing import Final

import torch

from workers.kv_engine.outputs import TokenScore
from workers.machine.transfers import begin_download

_SLICE_FLOATS: Final = 2**22
"""The number of logits processed at once: 16 MiB of them, plus a few temporary copies."""
_CACHED_FLOATS: Final = 2**19
"""The number on a CPU: within its cache it takes a third of the time (32 x 150k logits; 2026-11)."""
_LOW_BITS: Final = 0xFFFFFFFF


def score(
    logits_at: Callable[[torch.Tensor], torch.Tensor],
    indices: torch.Tensor,
    token_ids: torch.Tensor,
    *,
    top: int,
    vocab_size: int,
) -> list[TokenScore]:
    """Return the log probabilities of N tokens, and of the `top` likeliest tokens in the place of each.

    The arguments are those of `begin_score`.
    """
    return begin_score(logits_at, indices, token_ids, top=top, vocab_size=vocab_size)()


def begin_score(
    logits_at: Callable[[torch.Tensor], torch.Tensor],
    indices: torch.Tensor,
    token_ids: torch.Tensor,
    *,
    top: int,
    vocab_size: int,
) -> Callable[[], list[TokenScore]]:
    """Launch `score`, and return a function that waits for its result.

    `logits_at` returns logits, (n, vocab) float32, for n of the (N,) `indices`. A negative id among the (N,)
    `token_ids` stands for no token, and its numbers are meaningless. A `logprob` is NaN if the logits are.
    """
    parts = [
        _score(logits, ids.long(), min(top, vocab_size))
        for at, of_slice in _slices(_SLICE_FLOATS // vocab_size, indices, token_ids)
        for logits, ids in _cached_slices(logits_at(at), of_slice)
    ]
    taken, likely, logprobs = (torch.cat(column) for column in zip(*parts, strict=True))
    # One copy to the host: all values are exact in float64.
    table = torch.cat([token_ids.double()[:, None], taken, likely, logprobs], dim=-1)
    arriving, width = begin_download(table), likely.shape[-1]

    def read() -> list[TokenScore]:
        return [
            TokenScore(
                token_id=int(row[0]),
                logprob=row[1],
                top=tuple(zip(map(int, row[2 : 2 + width]), row[2 + width :], strict=True)),
            )
            for row in arriving().tolist()
        ]

    return read


def _slices(rows: int, *tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    return zip(*(torch.split(tensor, max(1, rows)) for tensor in tensors), strict=True)


def _cached_slices(logits: torch.Tensor, token_ids: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    is_cpu = logits.device.type == "cpu"
    return _slices(_CACHED_FLOATS // logits.shape[-1] if is_cpu else len(logits), logits, token_ids)


def _score(
    logits: torch.Tensor, token_ids: torch.Tensor, top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return log probabilities (n, 1), and the likeliest ids with theirs (n, top), in float64."""
    logprobs = torch.log_softmax(logits, dim=-1)
    taken = logprobs.gather(-1, token_ids.clamp(min=0)[:, None])
    likely = _likeliest(logits, top) if top else token_ids.new_empty(len(token_ids), 0)
    return taken.double(), likely.double(), logprobs.gather(-1, likely).double()


def _likeliest(logits: torch.Tensor, top: int) -> torch.Tensor:
    """Return the ids of the `top` largest logits of each row, in order: (n, vocab) float32 to (n, top)."""
    # A key has the bits of the float, as an integer of the same order, and below them the id, so that no
    # two keys are equal. In place, because on a CPU fresh memory would take most of the time.
    bits = logits.view(torch.int32)
    ascending = (bits >> 31).bitwise_and_(0x7FFFFFFF).bitwise_xor_(bits)
    ids = torch.arange(logits.shape[-1], device=logits.device)
    keys = ascending.long().bitwise_left_shift_(32).bitwise_or_(_LOW_BITS - ids)
    return _LOW_BITS - (keys.topk(top, dim=-1).values & _LOW_BITS)
