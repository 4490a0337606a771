"""Drafts in a step: the sequences that get drafted tokens, their number, and the accepted drafts.

The `Proposer` drafts the tokens, and the `Drafter` gives them room in the step and in the pool.
`accept_drafts` compares them with the tokens that the model sampled, and cuts off the others. No torch here.
"""

from collections.abc import Sequence as Items
from itertools import islice

from workers.kv_engine.counters import CacheCounters
from workers.kv_engine.scheduler import Scheduler
from workers.kv_engine.sequence import DraftLength, Sequence, Span
from workers.kv_engine.speculative.proposer import Proposer


class Drafter:
    """Adds at most `speculative_tokens` drafted tokens to each decode of a step."""

    def __init__(
        self,
        proposer: Proposer,
        scheduler: Scheduler,
        *,
        speculative_tokens: int,
        max_step_tokens: int,
        max_positions: int,
    ) -> None:
        self._proposer = proposer
        self._scheduler = scheduler
        self._speculative_tokens = speculative_tokens
        self._max_step_tokens = max_step_tokens
        self._max_positions = max_positions

    def extend(self, spans: Items[Span]) -> None:
        """Append drafted tokens to the spans that decode, as far as the step and the pool have room."""
        decodes = [span for span in spans if span.count == 1 and span.samples and span.sequence.can_speculate]
        budget = self._max_step_tokens - sum(span.count for span in spans)
        if not decodes or budget < len(decodes):
            return
        limits = [min(self._limit(span.sequence), budget // len(decodes)) for span in decodes]
        drafts = self._proposer.propose([span.sequence for span in decodes], limits)
        for span, draft in zip(decodes, drafts, strict=True):
            sequence = span.sequence
            fitting = draft[: self._scheduler.allocate_spare(sequence, len(draft))]
            sequence.ids += fitting
            span.count, span.drafted = 1 + len(fitting), len(fitting)

    def forget(self, key: str) -> None:
        """Drop the state of a sequence that has left the engine."""
        self._proposer.forget(key)

    def _limit(self, sequence: Sequence) -> int:
        """Return how many tokens may be drafted for a sequence; its last allowed token is never drafted."""
        if sequence.draft_length is None:
            sequence.draft_length = DraftLength(self._speculative_tokens)
        left = sequence.spec.max_tokens - sequence.generated - 1
        most = min(sequence.draft_length.current, left, self._max_positions - len(sequence.ids))
        return max(0, sequence.room_before_change(most))


def accept_drafts(spans: Items[Span], sampled: Items[int], counters: CacheCounters) -> list[list[int]]:
    """Return the new tokens of each span, accepted drafts included; cut the other drafts off.

    `sampled` has, for each span that samples, a token after its last undrafted token and after each draft.
    """
    left = iter(sampled)
    accepted: list[list[int]] = []
    for span in spans:
        tokens = list(islice(left, 1 + span.drafted)) if span.samples else []
        if span.drafted:
            tokens = _accept(span, tokens, counters)
        accepted.append(tokens)
    return accepted


def _accept(span: Span, sampled: list[int], counters: CacheCounters) -> list[int]:
    sequence = span.sequence
    drafted = sequence.ids[-span.drafted :]
    del sequence.ids[-span.drafted :]
    tokens: list[int] = []
    for token, draft in zip(sampled, [*drafted, None], strict=True):
        tokens.append(token)
        is_last = sequence.spec.finish_reason(token, sequence.generated + len(tokens)) is not None
        if token != draft or is_last:
            break
    accepted = len(tokens) - 1
    counters.drafted += len(drafted)
    counters.accepted += accepted
    assert sequence.draft_length is not None
    sequence.draft_length.update(drafted=len(drafted), accepted=accepted)
    sequence.ids += tokens[:-1]
    span.count, span.drafted = len(tokens), 0
    return tokens
