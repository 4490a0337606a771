"""The lengths of drafts that pay for a sequence, by measured costs and measured acceptance.

A draft of d tokens lengthens the step by what d more rows cost (`step_costs`), and gives A tokens more, where
A follows from the share p of drafts that were accepted so far:

    A = p + p**2 + ... + p**d

In that time a step without drafts would have given (sequences / its duration) tokens for each second. So the
draft pays if A is more than that, and the length is the one with the largest difference. The rows of other
drafts in the step count, so under load, where rows cost what they compute, nothing is drafted.

The share of a sequence begins as that of all sequences, which begins as `_EXPECTED`. While nothing is
drafted, shares return to that, and the costs of more rows to those of the rows that there are. So drafts are
tried again after some steps: a text may begin to repeat itself, and one slow step is no reason for ever.
Pure: reads no clock.
"""

from collections.abc import Iterable
from typing import Final

from workers.kv_engine.sequence import Acceptance
from workers.kv_engine.step_costs import StepCosts

LONGEST: Final = 8
"""The most tokens of a draft."""
_EXPECTED: Final = 0.5
"""The share of accepted drafts before any was seen."""
_KEPT_COSTS: Final = 0.99
"""The share that stays, after a step without a draft, of what more rows cost beyond its own."""
_MARGIN: Final = 1.1
"""A draft has to give so many times as many tokens as its time would otherwise: measurements have noise."""
_LEAST_GAIN: Final = 0.1
"""And so many more: or after a slow first step drafts would seem free, and no step without be measured."""


class Payoff:
    """The lengths of drafts for the sequences of an engine."""

    def __init__(self) -> None:
        self._costs: Final = StepCosts()
        self._all: Final = Acceptance()

    def observe_step(self, rows: int, took_s: float) -> None:
        """Learn from a step without prompts; the drafts in it are rows, too."""
        self._costs.observe(rows, took_s)

    def observe_draft(self, own: Acceptance, *, drafted: int, accepted: int) -> None:
        """Learn from a draft of a sequence."""
        own.add(drafted, accepted)
        self._all.add(drafted, accepted)

    @property
    def knows_costs(self) -> bool:
        """True if a step was measured. The first one is computed without drafts."""
        return self._costs.of(1) is not None

    def observe_undrafted(self, sequences: Iterable[Acceptance], *, decodes: int) -> None:
        """Count a step of `decodes` sequences in which drafts of these would not have paid."""
        for own in sequences:
            own.skip()
        self._all.skip()
        self._costs.forget_larger(decodes, _KEPT_COSTS)

    def length(self, own: Acceptance, *, most: int, decodes: int, rows: int) -> int:
        """Return how many tokens to draft for a sequence in the next step, 0 to `most`.

        Args:
            own: the acceptance of the sequence.
            most: the most tokens that it has room for.
            decodes: the number of sequences in the step.
            rows: the rows of the step so far: `decodes`, and the drafts of others.
        """
        alone_s, before_s = self._costs.of(decodes), self._costs.of(rows)
        if not alone_s or before_s is None:
            return 0
        share = own.share(self._all.share(_EXPECTED))
        best, best_gain, more = 0, _LEAST_GAIN, 0.0
        for count in range(1, min(most, LONGEST) + 1):
            more += share**count
            with_s = self._costs.of(rows + count)
            assert with_s is not None
            gain = more - _MARGIN * (with_s - before_s) * decodes / alone_s
            if gain > best_gain:
                best, best_gain = count, gain
            elif best or gain < 0:  # costs grow at least as rows do, and gains shrink
                break
        return best
