"""Texts that are packed into one row: their positions, and attention within each of them.

Models call `packed_attention` by transformers' attention interface, with the queries, keys and values of all
texts. Texts of equal length are adjacent and computed in one call, and nothing is padded.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final

import torch
from transformers import AttentionInterface

NAME: Final = "dalsegno_packed_texts"
"""The name of the function among transformers' attention functions."""
WINDOW_BLOCK: Final = 512
"""The queries of a call within a window, for texts that are much longer than the window."""


@dataclass(frozen=True, slots=True)
class Run:
    """Adjacent texts of equal length: the first token of the first, the number of texts, tokens of each."""

    begin: int
    texts: int
    tokens: int

    @property
    def end(self) -> int:
        return self.begin + self.texts * self.tokens


def runs_of(lengths: Sequence[int]) -> list[Run]:
    """The runs of texts of equal length, for the lengths of packed texts in their order."""
    runs, begin = [], 0
    for tokens, group in groupby(lengths):
        run = Run(begin, len(list(group)), tokens)
        runs.append(run)
        begin = run.end
    return runs


def divided(packed: torch.Tensor, lengths: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """The parts of a tensor whose first dimension is that of packed tokens, by text; not copied."""
    parts: tuple[torch.Tensor, ...] = torch.split(packed, [*lengths])
    return parts


def positions_of(model: Any, ids: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """The position of each packed token in its text, (1, T), counted as the class does.

    Models of RoBERTa's kind count from behind the padding token's id, and do not count padding tokens.
    """
    device = ids.device
    padding = getattr(getattr(model, "embeddings", None), "padding_idx", None)
    if padding is None:
        return torch.cat([torch.arange(length, device=device) for length in lengths])[None]
    counted = [(text != padding).long() for text in divided(ids[0], lengths)]
    return torch.cat([one.cumsum(0) * one + padding for one in counted])[None]


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    runs: Sequence[Run],
    scaling: float | None = None,
    sliding_window: int | None = None,
    bias: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attend within each text; the signature is that of transformers' attention functions.

    `query`, `key` and `value` are (1, heads, T, size), `bias` is (1, heads, N, N) for texts of up to N
    tokens. The mask is ignored: `runs` says which tokens see one another. A model is causal if the call or
    its module says so, and a window of w lets a token see those whose distance is below w.

    Returns:
        (1, T, heads, size), and no weights.
    """
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", False))
    output = value.new_empty(query.shape[2], query.shape[1], value.shape[3])
    for run in runs:
        q, k, v = (_texts(tensor, run) for tensor in (query, key, value))
        if sliding_window is not None and run.tokens > sliding_window:
            found = _in_window(q, k, v, sliding_window, scaling, is_causal=is_causal)
        else:
            found = torch.nn.functional.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=None if bias is None else bias[:, :, : run.tokens, : run.tokens],
                is_causal=is_causal and run.tokens > 1,
                scale=scaling,
                enable_gqa=q.shape[1] != k.shape[1],
            )
        output[run.begin : run.end].view(run.texts, run.tokens, *output.shape[1:]).copy_(
            found.transpose(1, 2)
        )
    return output[None], None


def _texts(tensor: torch.Tensor, run: Run) -> torch.Tensor:
    """The texts of a run as a batch: (1, heads, T, size) -> (texts, heads, tokens, size), not copied."""
    heads, size = tensor.shape[1], tensor.shape[3]
    return tensor[0, :, run.begin : run.end].view(heads, run.texts, run.tokens, size).transpose(0, 1)


def _in_window(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    window: int,
    scaling: float | None,
    *,
    is_causal: bool,
) -> torch.Tensor:
    """Attention within a window, block by block of queries: each reads only the keys that it may see."""
    tokens, parts = query.shape[2], []
    for begin in range(0, tokens, WINDOW_BLOCK):
        end = min(tokens, begin + WINDOW_BLOCK)
        first, last = max(0, begin - window + 1), end if is_causal else min(tokens, end + window - 1)
        rows = torch.arange(begin, end, device=query.device)[:, None]
        distance = rows - torch.arange(first, last, device=query.device)
        seen = (distance < window) & (distance >= 0 if is_causal else distance > -window)
        part = torch.nn.functional.scaled_dot_product_attention(
            query[:, :, begin:end],
            key[:, :, first:last],
            value[:, :, first:last],
            attn_mask=seen,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        parts.append(part)
    return torch.cat(parts, dim=2)


AttentionInterface.register(NAME, packed_attention)
