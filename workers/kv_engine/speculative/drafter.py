"""Drafts in a step: the sequences that get drafted tokens, their number, and the accepted drafts.

The `Proposer` drafts the tokens, and the `Drafter` gives them room in the step and in the pool.
`accept_drafts` compares them with the tokens that the model sampled, and cuts off the others. No torch here.
"""

from collections.abc import Sequence as Items
from itertools import islice

from workers.kv_engine.counters import CacheCounters
from workers.kv_engine.scheduler import Scheduler
from workers.kv_engine.sequence import DraftLength, Sequence, Span
from workers.kv_engine.speculative.payoff import Payoff
from workers.kv_engine.speculative.proposer import Proposer


class Drafter:
    """Adds at most `speculative_tokens` drafted tokens to each decode of a step.

    Args:
        payoff: decides how many; None drafts as many as the last drafts of a sequence allow (`DraftLength`).
    """

    def __init__(
        self,
        proposer: Proposer,
        scheduler: Scheduler,
        *,
        speculative_tokens: int,
        max_step_tokens: int,
        max_positions: int,
        payoff: Payoff | None = None,
    ) -> None:
        self._proposer = proposer
        self._scheduler = scheduler
        self._speculative_tokens = speculative_tokens
        self._max_step_tokens = max_step_tokens
        self._max_positions = max_positions
        self._payoff = payoff
        self._is_typical = True

    def extend(self, spans: Items[Span]) -> None:
        """Append drafted tokens to the spans that decode, as far as the step and the pool have room."""
        self._is_typical = True
        decodes = [span for span in spans if span.count == 1 and span.samples and span.sequence.can_speculate]
        budget = self._max_step_tokens - sum(span.count for span in spans)
        if not decodes or budget < len(decodes):
            return
        limits = [min(self._limit(span.sequence), budget // len(decodes)) for span in decodes]
        if self._payoff is not None:
            limits = self._worthwhile(self._payoff, spans, decodes, limits)
            # A proposer reads all of a text before its first draft, which later ones do not cost.
            drafted = [span.sequence.acceptance for span, most in zip(decodes, limits, strict=True) if most]
            self._is_typical = not any(acceptance.is_new for acceptance in drafted)
            for acceptance in drafted:
                acceptance.is_new = False
        drafts = self._proposer.propose([span.sequence for span in decodes], limits)
        for span, draft in zip(decodes, drafts, strict=True):
            sequence = span.sequence
            fitting = draft[: self._scheduler.allocate_spare(sequence, len(draft))]
            sequence.ids += fitting
            span.count, span.drafted = 1 + len(fitting), len(fitting)

    def observe_step(self, rows: int, took_s: float) -> None:
        """Learn what a step without prompts cost; its drafts are rows."""
        if self._payoff is not None and self._is_typical:
            self._payoff.observe_step(rows, took_s)

    def observe_draft(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """Learn how many tokens of a draft were accepted."""
        sequence.work.count_draft(drafted, accepted)
        if self._payoff is not None:
            self._payoff.observe_draft(sequence.acceptance, drafted=drafted, accepted=accepted)
        elif sequence.draft_length is not None:
            sequence.draft_length.update(drafted=drafted, accepted=accepted)

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

    @staticmethod
    def _worthwhile(
        payoff: Payoff, spans: Items[Span], decodes: Items[Span], limits: Items[int]
    ) -> list[int]:
        """Return how many tokens pay; none beside prompts, for the cost of such a step is not known."""
        rows = len(spans)
        if not payoff.knows_costs or any(span.count != 1 for span in spans):
            return [0] * len(decodes)
        lengths: list[int] = []
        for span, most in zip(decodes, limits, strict=True):
            own = span.sequence.acceptance
            lengths.append(payoff.length(own, most=most, decodes=len(spans), rows=rows))
            rows += lengths[-1]
        declined = [
            span.sequence
            for span, most, length in zip(decodes, limits, lengths, strict=True)
            if most and not length
        ]
        for sequence in declined:
            sequence.work.decline_draft()
        if declined:
            acceptances = (sequence.acceptance for sequence in declined)
            payoff.observe_undrafted(acceptances, decodes=len(spans))
        return lengths


def accept_drafts(
    spans: Items[Span], sampled: Items[int], counters: CacheCounters, drafter: Drafter | None
) -> list[list[int]]:
    """Return the new tokens of each span, accepted drafts included; cut the other drafts off.

    `sampled` has, for each span that samples, a token after its last undrafted token and after each draft.
    Spans without a `drafter` have none.
    """
    left = iter(sampled)
    accepted: list[list[int]] = []
    for span in spans:
        tokens = list(islice(left, 1 + span.drafted)) if span.samples else []
        if span.drafted:
            assert drafter is not None
            drafted = span.drafted
            tokens = _accept(span, tokens)
            counters.drafted += drafted
            counters.accepted += len(tokens) - 1
            drafter.observe_draft(span.sequence, drafted, len(tokens) - 1)
        accepted.append(tokens)
    return accepted


def _accept(span: Span, sampled: list[int]) -> list[int]:
    sequence = span.sequence
    drafted = sequence.ids[-span.drafted :]
    del sequence.ids[-span.drafted :]
    tokens: list[int] = []
    for token, draft in zip(sampled, [*drafted, None], strict=True):
        tokens.append(token)
        is_last = sequence.spec.finish_reason(token, sequence.generated + len(tokens)) is not None
        if token != draft or is_last:
            break
    sequence.ids += tokens[:-1]
    span.count, span.drafted = len(tokens), 0
    return tokens
