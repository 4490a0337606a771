"""Speculative decoding: a proposer drafts tokens, and the model verifies them in one forward.

A decode that speculates runs its last token and the drafted tokens as one span, and samples after each of
them with the random numbers that this token would have had without speculation. A draft is accepted if it
equals the sampled token. So the answer is the same, token by token, as without speculation, greedy or not,
for any proposer. Rejected drafts are cut off; their keys and values are after the end of the sequence and are
overwritten.

`PromptLookup` is a `Proposer` that repeats what followed the same tokens before;
`workers.kv_engine.speculative.draft_model` uses a smaller model. Sequences whose logits are adjusted, scored
or guided do not speculate, because the adjustment after a draft would depend on the draft.

The number of drafts is what pays (`workers.kv_engine.speculative.payoff`). Where a deployment sets it, it
follows the acceptance: doubled if all were accepted, else halved (`workers.kv_engine.sequence.DraftLength`).
No torch here.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Final, Protocol

from workers.kv_engine.sequence import Sequence

_NGRAMS: Final = (3, 2)
"""The lengths of the matched n-grams, the longest first."""
_MOST_INDEXED: Final = 16_384
"""The last tokens of a prompt that are looked up: about 5 MB of memory and 10 ms, once."""


class Proposer(Protocol):
    """A source of draft tokens."""

    def propose(self, sequences: Items[Sequence], most: Items[int]) -> list[list[int]]:
        """Return at most `most` tokens that may follow each sequence; an empty list is no draft."""
        ...

    def forget(self, key: str) -> None:
        """Drop the state of a sequence that is gone."""
        ...


class PromptLookup:
    """Drafts the tokens that followed the same n-gram last time, in the prompt or the answer."""

    def __init__(self) -> None:
        self._texts: dict[str, _NgramIndex] = {}

    def propose(self, sequences: Items[Sequence], most: Items[int]) -> list[list[int]]:
        return [
            self._of(sequence).draft(count) if count else []
            for sequence, count in zip(sequences, most, strict=True)
        ]

    def forget(self, key: str) -> None:
        self._texts.pop(key, None)

    def _of(self, sequence: Sequence) -> "_NgramIndex":
        text = self._texts.get(sequence.spec.key)
        if text is None or text.ids is not sequence.ids:
            text = self._texts[sequence.spec.key] = _NgramIndex(sequence.ids)
        return text


@dataclass(slots=True)
class _NgramIndex:
    """The tokens of one sequence, and the end of the last occurrence of each n-gram."""

    ids: list[int]
    last_ends: dict[tuple[int, ...], int] = field(default_factory=dict)
    indexed: int = 0

    def draft(self, most: int) -> list[int]:
        # The n-gram at the end of the text is indexed only when another token follows it.
        for end in range(max(self.indexed, 1, len(self.ids) - _MOST_INDEXED), len(self.ids)):
            for length in _NGRAMS:
                if end >= length:
                    self.last_ends[tuple(self.ids[end - length : end])] = end
        self.indexed = len(self.ids)
        for length in _NGRAMS:
            last = self.last_ends.get(tuple(self.ids[-length:]))
            if last is not None:
                return self.ids[last : last + most]
        return []
