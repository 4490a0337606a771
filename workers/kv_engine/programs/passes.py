"""Passes in a step: their spans, what a step knows of them besides, and their results.

The passes of a step come after its sequences in the packed tokens. Without a pass that is not causal, a step
has no ranges of keys, and every kernel computes it as before.
"""

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch

from models.programs import Mask, Pass
from shared.errors import BugError
from workers.kv_engine.programs.contexts import Context
from workers.kv_engine.sequence import Span
from workers.kv_engine.step import Int32s, Step

_NO_ID: Final = 0
"""The id of a token whose embedding is given."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PassSpan:
    """A pass that is computed in one step.

    Attributes:
        key: the key of its run.
        positions: (axes, T) int32, on the CPU.
    """

    key: str
    asked: Pass
    context: Context
    span: Span
    positions: torch.Tensor

    @property
    def key_ends(self) -> Int32s:
        """The number of keys that each token sees, (T,)."""
        start, count, asked = self.span.start, self.span.count, self.asked
        if asked.mask is Mask.FULL:
            return np.full(count, start + count, np.int32)
        index = np.arange(count, dtype=np.int32)
        if asked.mask is Mask.FRAMES:
            return start + (index // asked.frame_tokens + 1) * asked.frame_tokens
        return start + index + 1

    @property
    def full_starts(self) -> Int32s:
        """The first token that each token sees in both directions, (T,); itself in a causal pass."""
        start, count, asked = self.span.start, self.span.count, self.asked
        if asked.mask is Mask.FULL:
            return np.full(count, start, np.int32)
        index = np.arange(count, dtype=np.int32)
        if asked.mask is Mask.FRAMES:
            return start + index // asked.frame_tokens * asked.frame_tokens
        return start + index


def make_span(key: str, asked: Pass, context: Context, *, axes: int) -> PassSpan:
    """Return a pass as a span of its context; the context has room for it.

    Raises:
        BugError: the positions do not fit the pass.
    """
    sequence, count = context.sequence, asked.tokens
    ids = list(asked.ids) if asked.ids is not None else [_NO_ID] * count
    sequence.ids = [*sequence.ids[: context.length], *ids]
    positions = _positions(asked, context.next_position, axes)
    largest = np.maximum.accumulate(positions.amax(0).numpy())
    context.written = np.concatenate([context.written[: context.length], largest])
    return PassSpan(
        key=key,
        asked=asked,
        context=context,
        span=Span(sequence, context.length, count),
        positions=positions,
    )


def commit(done: PassSpan) -> None:
    """Extend the context by the tokens of a computed pass, if it commits them."""
    if done.asked.commits:
        done.context.set_length(done.span.start + done.span.count)


def add_passes(step: Step, passes: Items[PassSpan]) -> Step:
    """Return the step with the positions, routes and ranges of keys of its passes, its last spans."""
    tokens = sum(one.span.count for one in passes)
    positions = torch.cat([one.positions for one in passes], dim=1)
    place = step.positions[..., -tokens:]
    place.copy_(positions.reshape(place.shape))
    step = _with_rows(step, *embedded_rows(passes, len(step.token_ids) - tokens))
    step = _with_routes(step, passes, tokens)
    if all(one.asked.mask is Mask.CAUSAL for one in passes) and step.spans.key_ends is None:
        return step
    ends, full = _key_ranges(step)
    ends[-tokens:] = np.concatenate([one.key_ends for one in passes])
    full[-tokens:] = np.concatenate([one.full_starts for one in passes])
    return replace(
        step,
        spans=replace(step.spans, key_ends=ends, full_starts=full),
        key_ends=torch.from_numpy(ends).to(step.slots.device),
        full_starts=torch.from_numpy(full).to(step.slots.device),
    )


def _key_ranges(step: Step) -> tuple[Int32s, Int32s]:
    """The ranges of keys of a step's tokens; those of causal tokens where it has none."""
    if step.spans.key_ends is not None and step.spans.full_starts is not None:
        return step.spans.key_ends.copy(), step.spans.full_starts.copy()
    starts = step.spans.kv_lengths - np.diff(step.spans.query_offsets)
    own = np.concatenate(
        [np.arange(start, end) for start, end in zip(starts, step.spans.kv_lengths, strict=True)]
    ).astype(np.int32)
    return own + 1, own


def _with_rows(step: Step, rows: list[torch.Tensor], at: list[int]) -> Step:
    """The step with further embeddings, beside those of media in prompts."""
    if not rows:
        return step
    values, indices = torch.cat(rows), torch.tensor(at, dtype=torch.int64, device=step.token_ids.device)
    if step.row_values is not None and step.row_indices is not None:
        # Rows of media may be longer: what follows the embedding is added after layers.
        missing = step.row_values.shape[1] - values.shape[1]
        values = torch.cat([step.row_values, torch.nn.functional.pad(values, (0, missing))])
        indices = torch.cat([step.row_indices, indices])
    return replace(step, row_values=values, row_indices=indices)


def _with_routes(step: Step, passes: Items[PassSpan], tokens: int) -> Step:
    """The step with the set of weights of each token of its passes, which are its last `tokens`."""
    if all(one.asked.routes is None for one in passes):
        return step
    routes = torch.zeros(len(step.token_ids), dtype=torch.int8)
    if step.routes is not None:
        routes.copy_(step.routes)
    first = len(routes) - tokens
    for one in passes:
        if one.asked.routes is not None:
            routes[first : first + one.span.count] = one.asked.routes
        first += one.span.count
    return replace(step, routes=routes.to(step.token_ids.device))


def embedded_rows(passes: Items[PassSpan], first: int) -> tuple[list[torch.Tensor], list[int]]:
    """Return the embeddings that passes bring, and the tokens of the step that they replace.

    Args:
        passes: in the order of the step.
        first: the index of their first token in the step.
    """
    rows: list[torch.Tensor] = []
    at: list[int] = []
    for one in passes:
        if one.asked.embeds is not None:
            rows.append(one.asked.embeds)
            at += range(first, first + one.span.count)
        first += one.span.count
    return rows, at


def results_of(
    passes: Items[PassSpan],
    hidden: torch.Tensor,
    head: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> list[torch.Tensor]:
    """Return the states of each pass, (T, hidden), or the logits of some of its tokens, (n, vocab_size).

    Args:
        passes: the last spans of the step.
        hidden: the states of all tokens of the step.
        head: returns logits by those states and the indices of tokens; called once, for all passes.
    """
    if not passes:
        return []
    counts = [one.span.count for one in passes]
    first = len(hidden) - sum(counts)
    results = list(torch.split(hidden[first:], counts))
    wanted = [place for place, one in enumerate(passes) if one.asked.logits is not None]
    if not wanted:
        return results
    firsts = first + np.cumsum([0, *counts])
    indices = [firsts[place] + np.asarray(passes[place].asked.logits, np.int64) for place in wanted]
    logits = head(hidden, torch.from_numpy(np.concatenate(indices)).to(hidden.device))
    for place, found in zip(wanted, torch.split(logits, [len(one) for one in indices]), strict=True):
        results[place] = found
    return results


def _positions(asked: Pass, following: int, axes: int) -> torch.Tensor:
    count, given = asked.tokens, asked.positions
    if given is None:
        return torch.arange(following, following + count, dtype=torch.int32).repeat(axes, 1)
    if isinstance(given, int):
        return torch.full((axes, count), given, dtype=torch.int32)
    found = given.to("cpu", torch.int32)
    if tuple(found.shape) not in ((count,), (axes, count)):
        raise BugError(
            f"a pass of {count} tokens has positions of shape {tuple(found.shape)}: expected ({count},) or "
            f"({axes}, {count})"
        )
    return found.expand(axes, count)
