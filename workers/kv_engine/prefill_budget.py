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

MAX_PREFILL_STEP_S: Final = 3.0
"""The longest duration of a step of prompts: new arrivals and cancellations wait for its end."""
INITIAL_TOKENS: Final = 512
"""The prompt tokens of a step as long as the cost of one is unknown."""
_MIN_TOKEN_S: Final = 1e-9
_WEIGHT: Final = 0.2
"""The weight of the newest step in the moving averages, which cover about ten steps."""


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
        # By order of magnitude of the number of decodes: their average number, and their average cost in s.
        self._decodes: dict[int, tuple[float, float]] = {}
        self._token_s: float | None = None

    def tokens_with_decodes(self, decodes: int, prompts: int) -> int:
        """Return the prompt tokens for a step with `decodes` decodes while `prompts` prompts wait."""
        alone_s, soon_s = self._decodes_s(decodes), self._decodes_s(decodes + prompts)
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
            size = decodes.bit_length()
            number, alone_s = self._decodes.get(size, (None, None))
            self._decodes[size] = _average(number, decodes), _average(alone_s, took_s)
        elif prefill_tokens:
            alone_s = self._decodes_s(decodes) if decodes else 0.0
            if alone_s is not None:
                per_token_s = max(took_s - alone_s, 0.0) / prefill_tokens
                self._token_s = _average(self._token_s, per_token_s)

    def _decodes_s(self, decodes: int) -> float | None:
        """Return the cost of so many decodes, on the line through the two nearest observed numbers."""
        nearest = sorted(self._decodes.values(), key=lambda seen: abs(seen[0] - decodes))[:2]
        if len(nearest) < 2:
            return nearest[0][1] if nearest else None
        (few, few_s), (many, many_s) = sorted(nearest)
        slope_s = max(0.0, (many_s - few_s) / (many - few))  # noise must not make more decodes cost less
        return max(few_s, many_s + slope_s * (decodes - many))


def _average(before: float | None, now: float) -> float:
    return now if before is None else before + _WEIGHT * (now - before)
