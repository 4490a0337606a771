"""Throttle of sequences with slow masks: the others of a step would wait for them. Pure.

A mask usually takes some hundred microseconds and is ready before the forward is; one of an ambiguous grammar
takes 20 ms, for every token. So a step has at most one such sequence: one thread computes all masks, and a
request that arrives waits for one at most. While other sequences run, those with slow masks together get a
tenth of the time.
"""

import time
from collections.abc import Callable, Collection
from typing import Final

from workers.kv_engine.sequence import Sequence

SLOW_S: Final = 0.004
"""The CPU time from which on a mask is slow: several times what large vocabularies and wide schemas take."""
_SHARE: Final = 0.1
"""The share of the time for slow masks."""


class MaskThrottle:
    """Decides which sequences with slow masks take part in a step.

    Args:
        clock: returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next_s = 0.0

    def left_out(
        self, sequences: Collection[Sequence], served: Callable[[Sequence], float]
    ) -> frozenset[Sequence]:
        """Those of a step's sequences that are left to a later step.

        `served` is how much a sequence's tenant has been served; the least served one comes first.
        """
        slow = [one for one in sequences if one.guide_state is not None and one.guide_state.mask_s > SLOW_S]
        if not slow:
            return frozenset()
        now_s, are_alone = self._clock(), len(slow) == len(sequences)
        if now_s < self._next_s and not are_alone:
            return frozenset(slow)
        turn = min(slow, key=lambda one: (served(one), len(one.ids) - len(one.spec.prompt_ids)))
        assert turn.guide_state is not None
        self._next_s = now_s + turn.guide_state.mask_s / _SHARE
        return frozenset(slow) - {turn}
