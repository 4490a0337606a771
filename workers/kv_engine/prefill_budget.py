"""Prefill budget: how many prompt tokens a step may compute next to the sequences that decode.

Without a limit, a long prompt would stall the tokens of all other sequences. The cost of a step is modelled
as the cost of its decodes plus a cost for each prompt token. Both costs are learned from the steps that were
run.

A step with decodes and prompt tokens may take `decode_slowdown_limit` times as long as a step of decodes
alone would take if the waiting prompts decoded, too. The waiting prompts count because their own decodes will
soon make steps that long anyway; without them, the first sequence that decodes would hold up all prompts of a
burst. A step without decodes, or in a burst of prompts (`workers.kv_engine.scheduler`), may take
`MAX_PREFILL_STEP_S` (`max_tokens`). The engine reports each step (`observe`); the scheduler asks before each
step. Pure: it is given durations and
reads no clock.
"""

from typing import Final

from workers.kv_engine.step_costs import StepCosts, average

MAX_PREFILL_STEP_S: Final = 3.0
"""The longest duration of a step of prompts: new arrivals and cancellations wait for its end."""
INITIAL_TOKENS: Final = 512
"""The prompt tokens of a step as long as the cost of one is unknown."""
_MIN_TOKEN_S: Final = 1e-9


class PrefillBudget:
    """A learned cost model of a step, and the prompt tokens that it allows.

    Args:
        decode_slowdown_limit: the most times as long as its decodes alone that a step may take; at least 1.
        min_tokens: the prompt tokens that a step may always compute, even above the limit, so that every
            prompt is finished.
    """

    def __init__(self, *, decode_slowdown_limit: float, min_tokens: int) -> None:
        if decode_slowdown_limit < 1 or min_tokens < 1:
            raise ValueError(
                "expected decode_slowdown_limit and min_tokens to be at least 1, "
                f"found {decode_slowdown_limit} and {min_tokens}"
            )
        self._limit = decode_slowdown_limit
        self._min_tokens = min_tokens
        self._decodes = StepCosts()
        self._token_s: float | None = None

    def tokens_with_decodes(self, decodes: int, prompts: int) -> int:
        """Return the prompt tokens for a step with `decodes` decodes while `prompts` prompts wait."""
        alone_s, soon_s = self._decodes.of(decodes), self._decodes.of(decodes + prompts)
        if alone_s is None or soon_s is None or not self._token_s:
            return self._min_tokens
        return max(self._min_tokens, int((self._limit * soon_s - alone_s) / self._token_s))

    def max_tokens(self) -> int:
        """Return the most prompt tokens that any step may have."""
        if self._token_s is None:
            return max(INITIAL_TOKENS, self._min_tokens)
        return max(self._min_tokens, int(MAX_PREFILL_STEP_S / max(self._token_s, _MIN_TOKEN_S)))

    def observe(self, *, decodes: int, prefill_tokens: int, took_s: float) -> None:
        """Learn from a step that was run."""
        if decodes and not prefill_tokens:
            self._decodes.observe(decodes, took_s)
        elif prefill_tokens:
            alone_s = self._decodes.of(decodes) if decodes else 0.0
            if alone_s is not None:
                per_token_s = max(took_s - alone_s, 0.0) / prefill_tokens
                self._token_s = average(self._token_s, per_token_s)
