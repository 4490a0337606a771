"""A small token program, in several ways: masked blocks are filled in, one token at a time.

plain     the block sees the committed text and itself; it is committed when it has no masks left
keep      the block is computed with a mask behind it, and kept by the pass after it (`Pass.after`)
crop      each block computes the last two tokens of the text again (`Pass.after`)
guided    a second context, which does not see the prompt, and is forked at its first token
judged    a companion model (`Pass.tower`) has a say in each choice
"""

from collections.abc import Generator, Sequence
from typing import Any, Final

import torch

from models.programs import Mask, NewTokens, Pass, TokenDriver, TokenRequest
from models.sequence_request import SamplingParams
from models.transformers_lm.node import DecoderLM
from tests.workers.cpu_kernels import models
from tests.workers.kv_engine.programs.pass_oracle import PassOracle, tokens_by
from workers.kv_engine.sequence_spec import SequenceSpec

MASK: Final = models.VOCABULARY - 1
WAYS: Final = ("plain", "keep", "crop", "guided", "judged")
JUDGE: Final = "judge"

Rounds = Generator[list[Pass], list[torch.Tensor], None]


class Infill:
    """The driver. Its rounds are a generator, which gets the results of each."""

    def __init__(self, request: TokenRequest, way: str, block: int) -> None:
        self._request, self._way, self._block = request, way, block
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
            ids = [MASK] * self._block
            while MASK in ids:
                masked = [place for place, one in enumerate(ids) if one == MASK]
                results = yield self._over(text, ids, masked)
                place, token = _choice(results, self._way, used={*text, *ids})
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
        behind = [MASK] if self._way == "keep" else []
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
    logits[:, [MASK, *used]] = -torch.inf
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
        self.token_programs: Final = {"infill": infill}
        self.towers: Final = {JUDGE: MaskedLM(judge)}


def infill(_node: Any, request: TokenRequest) -> TokenDriver:
    """Start the program."""
    return Infill(request, request.options.get("way", "plain"), request.options.get("block", 4))


def infill_node() -> InfillLM:
    """The node, with the same weights at each call."""
    return InfillLM(models.node(), models.node("llama"))


def spec(key: str, prompt: list[int], way: str = "plain", **options: Any) -> SequenceSpec:
    """A sequence of the program."""
    settings = {"max_tokens": 12, **options}
    return SequenceSpec(key=key, prompt_ids=prompt, token_program="infill", options={"way": way}, **settings)


def expected(node: InfillLM, asked: SequenceSpec) -> list[int]:
    """The tokens by the oracle, without those after the end of the answer."""
    request = TokenRequest(
        prompt_ids=asked.prompt_ids,
        prefix_ids=asked.prefix_ids,
        max_tokens=asked.max_tokens,
        end_ids=asked.end_ids,
        sampling=SamplingParams(),
        options=asked.options,
        seed=0,
        choice=0,
    )
    oracle = PassOracle({"": node.model, JUDGE: node.towers[JUDGE].model})
    found = tokens_by(oracle, infill(node, request), ends=lambda ids: not asked.end_ids.isdisjoint(ids))
    count = next((n for n, one in enumerate(found, 1) if one in asked.end_ids), asked.max_tokens)
    return found[: min(count, asked.max_tokens)]
