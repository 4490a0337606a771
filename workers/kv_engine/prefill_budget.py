"""How much of a prompt is computed beside sequences that decode, so that their tokens do not stall.

A step costs what its decodes cost, and so much for each token of a prompt beside them. Both are learned from
the steps that were run. A step beside decodes may take `stretch` times what decodes alone would take if all
whose prompts wait decoded too. Their steps will soon be that long anyway, and letting them in by a few tokens
beside the first who decodes would keep them waiting. Where prompts come first it may take `LONGEST_S`. Pure:
it is told times, and asks no clock.
"""

from typing import Final

LONGEST_S: Final = 3.0
"""How long a step of prompts may take: who comes next waits for it, and who is cancelled runs on in it."""
FIRST: Final = 512
"""How many tokens of prompts a step has before it is known what one costs."""
_NOTHING_S: Final = 1e-9
_WEIGHT: Final = 0.2
"""Of the newest step in the averages: some ten steps are remembered."""


class Pace:
    """The allowance for prompts beside decodes.

    Args:
        stretch: how many times as long a step with prompts may take as decodes alone would, those who wait
            counted among them.
        least: tokens of prompts that are computed whatever they cost, so that each comes to its end.
    """

    def __init__(self, *, stretch: float, least: int) -> None:
        if stretch < 1 or least < 1:
            raise ValueError(f"expected stretch and least to be at least 1, found {stretch} and {least}")
        self._stretch = stretch
        self._least = least
        self._decodes: dict[int, tuple[float, float]] = {}  # of each order of magnitude: how many, and s
        self._token_s: float | None = None

    def allowance(self, decodes: int, prompts: int) -> int:
        """How many tokens of so many prompts are computed beside so many decodes."""
        alone_s, soon_s = self._alone_s(decodes), self._alone_s(decodes + prompts)
        if alone_s is None or soon_s is None or not self._token_s:
            return self._least
        return max(self._least, int((self._stretch * soon_s - alone_s) / self._token_s))

    def most(self) -> int:
        """How many tokens of prompts a step has at most, whoever else is in it."""
        if self._token_s is None:
            return max(FIRST, self._least)
        return max(self._least, int(LONGEST_S / max(self._token_s, _NOTHING_S)))

    def observe(self, *, decodes: int, prefill_tokens: int, took_s: float) -> None:
        """A step has come to its end."""
        if decodes and not prefill_tokens:
            size = decodes.bit_length()
            number, alone_s = self._decodes.get(size, (None, None))
            self._decodes[size] = _mixed(number, decodes), _mixed(alone_s, took_s)
        elif prefill_tokens:
            alone_s = self._alone_s(decodes) if decodes else 0.0
            if alone_s is not None:
                per_token_s = max(took_s - alone_s, 0.0) / prefill_tokens
                self._token_s = _mixed(self._token_s, per_token_s)

    def _alone_s(self, decodes: int) -> float | None:
        """What so many decodes cost alone: on the line through the two nearest numbers seen."""
        nearest = sorted(self._decodes.values(), key=lambda seen: abs(seen[0] - decodes))[:2]
        if len(nearest) < 2:
            return nearest[0][1] if nearest else None
        (few, few_s), (many, many_s) = sorted(nearest)
        slope_s = max(0.0, (many_s - few_s) / (many - few))  # measured with noise: more never cost less
        return max(few_s, many_s + slope_s * (decodes - many))


def _mixed(before: float | None, now: float) -> float:
    return now if before is None else before + _WEIGHT * (now - before)
