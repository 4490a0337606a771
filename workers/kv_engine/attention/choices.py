"""The keys that tokens attend to, where an indexer chooses them (`models.transformers_lm.indexers`).

An indexer's key is the end of a token's row in the pool. A choice is made in the step's groups of spans, and
is a group again: with fewer slots where each span has one query, else with a mask. Layers that share a choice
share the groups.

**Equal scores.** A score is a sum over heads of what is positive, so the scores of many keys are exactly 0.
If the last key of a choice and the first one after it are equal, which of them is taken is decided by torch's
`topk`, by the whole row of scores: also by its length. In transformers' `generate` a row is as long as the
prompt, or as the text so far behind it. So such a token gets its choice from a row of that length, whatever
was computed beside it. Its keys and values in later layers depend on the length of the prompt, and so does
all that follows: the prefix cache is told (`ChosenKeys.ties`).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import torch

from models.transformers_lm.indexers import Indexed, scores
from shared.errors import BugError
from workers.kv_engine.attention.span_groups import Group
from workers.kv_engine.step import Spans

PIECE: Final = 1 << 24
"""The most products of a query's head and a key that are in memory at once."""


class ChosenKeys:
    """The choices of one step.

    Args:
        spans: the spans of the step.
        device: where its tensors are.
    """

    def __init__(self, spans: Spans, device: torch.device) -> None:
        if spans.prompt_lengths is None:
            raise BugError("a step of a node with indexers has the lengths of its prompts")
        counts = np.diff(spans.query_offsets)
        starts = np.repeat(spans.kv_lengths - spans.query_offsets[1:], counts)
        seen = starts + np.arange(len(starts), dtype=np.int32) + 1  # keys that each token may see
        rows = np.maximum(seen, np.repeat(spans.prompt_lengths, counts))
        self._seen: Final = torch.from_numpy(seen.astype(np.int64)).to(device)
        self._rows: Final = torch.from_numpy(rows.astype(np.int64)).to(device)
        self._made: Final[dict[int, Sequence[Group]]] = {}
        self._tied: Final = torch.zeros(len(seen), dtype=torch.bool, device=device)
        self._offsets: Final = spans.query_offsets

    def ties(self) -> list[int | None]:
        """Return of each span its first token whose choice depends on the length of the prompt, from 0."""
        tied = np.flatnonzero(self._tied.cpu().numpy())
        places = np.searchsorted(tied, self._offsets)
        return [
            int(tied[first] - begin) if first < end else None
            for begin, first, end in zip(self._offsets[:-1], places[:-1], places[1:], strict=True)
        ]

    def groups(self, indexed: Indexed, cells: torch.Tensor, whole: Sequence[Group]) -> Sequence[Group]:
        """Return the groups for layers that attend to this choice.

        Args:
            indexed: what the indexer made of the step's tokens; its keys are in `cells` already.
            cells: the rows of the indexer's layer, (slots, 1, numbers).
            whole: the groups for layers that attend to all keys.
        """
        if indexed.layer not in self._made:
            keys = cells[:, 0, cells.shape[-1] - indexed.keys.shape[-1] :]  # (slots, D)
            self._made[indexed.layer] = [self._chosen(indexed, keys, group) for group in whole]
        return self._made[indexed.layer]

    def _chosen(self, indexed: Indexed, keys: torch.Tensor, group: Group) -> Group:
        slots = group.slots.view(group.spans, -1)
        length = slots.shape[1]
        if length <= indexed.top:
            return group
        queries = (group.tokens if group.queries is None else group.queries).view(group.spans, -1)
        stored = keys.index_select(0, group.slots).view(*slots.shape, -1)
        # In pieces: real models have 64 heads, and texts of 100,000 tokens.
        size = max(1, PIECE // (group.spans * indexed.queries.shape[1] * length))
        pieces = torch.split(queries, size, dim=1)
        columns = torch.cat([self._columns(indexed, stored, one) for one in pieces], dim=1)  # (B, Q, top)
        if group.queries is None:
            found = columns[:, 0]
            mask = None if group.mask is None else group.mask.gather(-1, found[:, None, None])
            return replace(group, slots=slots.gather(1, found).flatten(), mask=mask)
        hidden = torch.ones((*columns.shape[:2], length), dtype=torch.bool, device=columns.device)
        hidden.scatter_(-1, columns, value=False)
        causal = group.mask
        if causal is None:  # the spans' tokens see all keys: there is one key, and no choice of it
            raise BugError("a group with several queries, of which none sees too much, has no mask")
        return replace(group, mask=causal.masked_fill(hidden[:, None], float("-inf")))

    def _columns(self, indexed: Indexed, stored: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
        """Return the chosen columns, (B, Q, top), for queries (B, Q) and stored keys (B, L, D)."""
        tokens, top = queries.flatten(), indexed.top
        found = scores(
            indexed.queries.index_select(0, tokens).view(*queries.shape, *indexed.queries.shape[1:]),
            indexed.weights.index_select(0, tokens).view(*queries.shape, -1),
            stored,
            scale=indexed.scale,
        )
        seen = self._seen[queries]  # (B, Q)
        columns = torch.arange(found.shape[-1], device=found.device)
        found = found.masked_fill_(columns >= seen[..., None], float("-inf"))
        best = found.topk(top + 1, dim=-1)
        last, next_one = best.values[..., top - 1], best.values[..., top]
        chosen = best.indices[..., :top].contiguous()
        tied = (last == next_one) & (seen > top)
        for place in tied.nonzero().tolist():
            span, query = place
            count = int(seen[span, query])
            row = found.new_full((int(self._rows[queries[span, query]]),), float("-inf"))
            row[:count] = found[span, query, :count]
            chosen[span, query] = row.topk(top).indices
        self._tied[queries[tied]] = True
        return chosen
