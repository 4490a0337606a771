"""The torch node: a language model with the program `infill`, which fills in masked blocks token by token.

plain     the block sees the committed text and itself; it is committed when it has no masks left
keep      the block is computed with a mask behind it, and kept by the pass after it (`Pass.after`)
crop      each block computes the last two tokens of the text again (`Pass.after`)
guided    a second context, which does not see the prompt, and is forked at its first token
judged    a companion model (`Pass.tower`) has a say in each choice

Each choice is the most certain one among the tokens that the text does not have yet. The mask is the last id.
"""

from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch

from models.checkpoints.progress import Progress, silent
from models.programs import Mask, NewTokens, Pass, TokenDriver, TokenProgram, TokenRequest
from models.transformers_lm.loader import load_decoder
from models.transformers_lm.node import DecoderLM

JUDGE: Final = "judge"

Rounds = Generator[list[Pass], list[torch.Tensor], None]


class Infill:
    """The driver. Its rounds are a generator, which gets the results of each."""

    def __init__(self, request: TokenRequest, way: str, block: int, mask: int) -> None:
        self._request, self._way, self._block, self._mask = request, way, block, mask
        self._new: list[int] = []
        self._forwards = 0
        self._rounds = self._run()
        self._next = next(self._rounds)
        self._has_ended = False
        contexts = 2 if way in ("guided", "judged") else 1
        self.max_contexts = contexts
        self.max_tokens = contexts * (len(request.prompt_ids) + request.max_tokens + 2 * block)

    def passes(self) -> Sequence[Pass]:
        """The passes of the next round."""
        return self._next

    def take(self, results: Sequence[torch.Tensor]) -> NewTokens | None:
        """Go on; a block is emitted when it has no masks left."""
        self._forwards += 1
        self._new = []
        try:
            self._next = self._rounds.send(list(results))
        except StopIteration:
            self._has_ended = True
        if not self._new:
            return None
        counts, self._forwards = {"forwards": self._forwards}, 0
        return NewTokens(ids=self._new, ended=self._has_ended, counts=counts)

    def _run(self) -> Rounds:
        asked = self._request
        text = [*asked.prompt_ids]
        yield from self._begin(text)
        for first in range(0, len(asked.prefix_ids), self._block):  # as they were computed before
            block = [*asked.prefix_ids[first : first + self._block]]
            yield self._over(text, block, None)
            text += block
        while len(text) < len(asked.prompt_ids) + asked.max_tokens:
            ids = [self._mask] * self._block
            while self._mask in ids:
                masked = [place for place, one in enumerate(ids) if one == self._mask]
                results = yield self._over(text, ids, masked)
                place, token = _choice(results, self._way, used={self._mask, *text, *ids})
                ids[masked[place]] = token
            yield self._over(text, ids, None)
            text += ids
            self._new = ids

    def _begin(self, text: list[int]) -> Rounds:
        if self._way == "guided":
            yield [Pass(context="free", ids=text[:1], commits=True)]
            yield [Pass(context="text", ids=text[1:], forks="free", commits=True)]
            return
        whole = Pass(context="text", ids=text, commits=True)
        judge = Pass(context=JUDGE, tower=JUDGE, ids=text, commits=True)
        yield [whole, judge] if self._way == "judged" else [whole]

    def _over(self, text: list[int], ids: list[int], masked: list[int] | None) -> list[Pass]:
        """The passes over a block: for the logits of masked places, or for the last time."""
        again = 2 if self._way == "crop" else 0
        behind = [self._mask] if self._way == "keep" else []
        common: dict[str, Any] = {
            "ids": [*text[len(text) - again :], *ids, *behind],
            "mask": Mask.FULL,
            "logits": None if masked is None else [again + place for place in masked],
            "commits": masked is None and not behind,
        }
        after = len(text) - again if again or behind else None
        passes = [Pass(context="text", after=after, **common)]
        if self._way == "guided":
            passes.append(Pass(context="free", **common))
        if self._way == "judged":
            passes.insert(0, Pass(context=JUDGE, tower=JUDGE, **common))
        return passes


def _choice(results: list[torch.Tensor], way: str, *, used: set[int]) -> tuple[int, int]:
    """The place and the token of the most certain choice among new tokens; `results` are (n, vocab) each."""
    logits = results[0] if len(results) == 1 else 2 * results[0] - (1 if way == "guided" else -1) * results[1]
    logits = logits.clone()
    logits[:, [*used]] = -torch.inf
    certainty, tokens = logits.softmax(-1).max(-1)
    place = int(certainty.argmax())
    return place, int(tokens[place])


class MaskedLM(DecoderLM):
    """A language model whose tokens may see later ones."""

    masks = frozenset({"causal", "full"})

    def __init__(self, decoder: DecoderLM) -> None:
        super().__init__(
            decoder.model,
            name=decoder.name,
            layout=decoder.layout,
            max_positions=decoder.max_positions,
            weights_digest=decoder.weights_digest,
        )


class InfillLM(MaskedLM):
    """A language model with the program `infill`, and another one as its judge."""

    def __init__(self, decoder: DecoderLM, judge: DecoderLM) -> None:
        super().__init__(decoder)
        self.token_programs: Final[dict[str, TokenProgram]] = {"infill": infill}
        self.towers: Final = {JUDGE: MaskedLM(judge)}


def infill(node: Any, request: TokenRequest) -> TokenDriver:
    """Start the program."""
    given = request.options
    return Infill(request, given.get("way", "plain"), given.get("block", 4), node.vocab_size - 1)


def load(
    checkpoint: Path,
    node: str,
    *,
    device: str | torch.device = "cpu",
    dtype: str = "auto",
    progress: Progress = silent,
    kwargs: Mapping[str, Any] = MappingProxyType({}),
) -> DecoderLM:
    """Load the node; the judge is the same model."""
    decoder, judge = (
        load_decoder(checkpoint, node, device=device, dtype=dtype, progress=progress) for _ in range(2)
    )
    return InfillLM(decoder, judge)
