"""Speculation: tokens are guessed, and the model says in one forward how many of the guesses are its own.

A decode that can_speculate runs its last token and the guesses behind it as one span, and samples behind each of
them with the very draw that this token would have had alone. A guess stands as far as it is what was sampled:
so the answer is, token by token, what it is without speculation, greedy or not, whoever guesses. What did not
stand is cut off again: its keys and values are behind the end of what counts, and are written over.

Who guesses is a `Proposer`: `PromptLookup`, here, finds what followed the same tokens before; a smaller model
is in `workers.kv_engine.speculative.draft_model`. Sequences whose logits are adjusted, scored or guided do
not speculate: what is done to the logits behind a guess depends on the guess.

How many guesses a sequence gets follows its luck: doubled when all stood, halved when not. No torch here.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Final, Protocol

from workers.kv_engine.sequence import Sequence

_NGRAMS: Final = (3, 2)
"""How many tokens must have been the same, the longest first."""


class Proposer(Protocol):
    """Who guesses."""

    def propose(self, sequences: Items[Sequence], most: Items[int]) -> list[list[int]]:
        """What may follow each sequence's `ids`: at most so many tokens, none where there is no guess."""
        ...

    def forget(self, key: str) -> None:
        """A sequence is gone."""
        ...


class PromptLookup:
    """Guesses what followed the same tokens the last time, in the prompt or in the answer."""

    def __init__(self) -> None:
        self._texts: dict[str, _Text] = {}

    def propose(self, sequences: Items[Sequence], most: Items[int]) -> list[list[int]]:
        return [self._of(sequence).guess(count) for sequence, count in zip(sequences, most, strict=True)]

    def forget(self, key: str) -> None:
        self._texts.pop(key, None)

    def _of(self, sequence: Sequence) -> "_Text":
        text = self._texts.get(sequence.spec.key)
        if text is None or text.ids is not sequence.ids:
            text = self._texts[sequence.spec.key] = _Text(sequence.ids)
        return text


@dataclass(slots=True)
class _Text:
    """One sequence's tokens, and where each short run of them ended last."""

    ids: list[int]
    ended: dict[tuple[int, ...], int] = field(default_factory=dict)
    indexed: int = 0

    def guess(self, most: int) -> list[int]:
        # The run that ends the text is indexed when something follows it: it is looked for, not found.
        for end in range(max(self.indexed, 1), len(self.ids)):
            for length in _NGRAMS:
                if end >= length:
                    self.ended[tuple(self.ids[end - length : end])] = end
        self.indexed = len(self.ids)
        for length in _NGRAMS:
            last = self.ended.get(tuple(self.ids[-length:]))
            if last is not None:
                return self.ids[last : last + most]
        return []
