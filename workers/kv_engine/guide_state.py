"""Guide state of one sequence: the tokens that its guide (a grammar) allows next. Imports no torch.

A request may allow only some tokens at all (`allowed_token_ids`), with or without a guide.

It is a fold over the tokens that the sequence has generated, so a resumed sequence reaches the same state.
Tokens that end an answer are allowed where the guide may end, and nowhere else. Before `min_tokens`, and for
a guide that is to be exhausted, they are allowed only where no other token may follow.
"""

from collections.abc import Sequence as Items

import numpy as np
import numpy.typing as npt

from workers.kv_engine.sequence_spec import SequenceSpec

Bits = npt.NDArray[np.uint8]


class GuideState:
    """The guide of one sequence after the tokens that it has generated, and the tokens that end it.

    `vocab_size` is the model's. A sequence may have `allowed_token_ids` and no guide.

    Attributes:
        mask_s: the CPU time that its last mask took, in seconds; the thread of masks writes it.
    """

    def __init__(self, spec: SequenceSpec, vocab_size: int) -> None:
        self.mask_s = 0.0
        guide, only = spec.guide, spec.sampling.allowed_token_ids
        self._matcher = None if guide is None else guide.matcher()
        self._only = _bits_of(only, vocab_size) if only else None
        self._begin = len(spec.prompt_ids)
        size = vocab_size if guide is None else guide.vocab_size
        marks = frozenset[int]() if guide is None else guide.marks
        self._ends = [token_id for token_id in sorted(spec.end_ids) if token_id < size]
        self._spelled_ends = [token_id for token_id in self._ends if token_id not in marks]
        self._min_tokens = spec.sampling.min_tokens
        self._exhausts = spec.exhausts_guide

    def allowed(self, ids: Items[int]) -> Bits:
        """Return the tokens that may follow `ids`, the prompt and all generated tokens: bits, lowest first.

        Raises:
            InvalidGuideError: the guide is too expensive to follow.
        """
        if self._matcher is None:
            assert self._only is not None, "a sequence without a guide has allowed tokens"
            return self._only
        bits, may_end = self._matcher.push(ids[self._begin + self._matcher.tokens :])
        for token_id in self._spelled_ends:
            bits[token_id >> 3] &= ~np.uint8(1 << (token_id & 7))
        if self._only is not None:
            shared = min(len(bits), len(self._only))
            bits[:shared] &= self._only[:shared]
            bits[shared:] = 0
        if may_end and (self._is_due(len(ids) - self._begin) or not bits.any()):
            for token_id in self._ends:
                bits[token_id >> 3] |= np.uint8(1 << (token_id & 7))
        return bits

    def unread(self, ids: Items[int]) -> int:
        """Return the number of tokens that `allowed(ids)` has yet to follow, at least 1."""
        return 1 if self._matcher is None else max(1, len(ids) - self._begin - self._matcher.tokens)

    def ban(self) -> None:
        """Make all later uses of the guide fail: it takes too long."""
        if self._matcher is not None:
            self._matcher.ban()

    def _is_due(self, generated: int) -> bool:
        """True if the answer may end although other tokens are allowed."""
        return generated >= self._min_tokens and not self._exhausts


def _bits_of(token_ids: Items[int], vocab_size: int) -> Bits:
    """Tokens as bits, lowest first: (ceil(vocab_size / 8),) uint8."""
    flags = np.zeros(vocab_size, np.uint8)
    flags[list(token_ids)] = 1
    return np.packbits(flags, bitorder="little")
