"""The token program of masked diffusion models: a canvas of masks behind the prompt is filled in.

All tokens of the canvas see one another, so each step computes prompt and canvas again (LLaDA, Dream). The
canvas is filled block by block; a block is one emission. With a cache, only the first step of a block
computes everything (Fast-dLLM). The further ones compute less, behind keys and values that are out of date:

    none      [prompt, finished, block, masks]      every step: exact
    prefix    [block, masks]                        behind the kept keys of what comes before the block
    dual      [block]                               behind the kept keys of everything else

Where a model's logits at a token are those of the next one (Dream), the token before the block is computed
with it. With guidance, a second context has a masked prompt.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import torch

from models.diffusion_text.candidates import Candidates, Draw
from models.diffusion_text.filters import without_mask
from models.diffusion_text.guidance import contexts_of, guided
from models.diffusion_text.refinement import Block, Rules
from models.diffusion_text.seeds import generator_of
from models.programs import Mask, NewTokens, Pass, TokenRequest
from shared.events import FORWARDS, PARALLEL_TOKENS

Cache: TypeAlias = Literal["none", "prefix", "dual"]
RulesOf: TypeAlias = Callable[[int, torch.Generator], Rules]
"""Returns the rules of a block, by the number of its masks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CanvasRecipe:
    """The settings by which a canvas is filled in.

    Attributes:
        mask_id: the token of a place that is not filled in. It is never an answer.
        shifts: the logits at a token are those of the next one.
        block_length: the tokens of a block; the last one may have fewer.
        draw: draws a token and its confidence for each place, of logits (L, vocab) float64.
        rules_of: the rules of each block.
        guidance_scale: w in `free + (w + 1) (text - free)`; 0 is off.
        cache: what a step does not compute again.
    """

    mask_id: int
    shifts: bool
    block_length: int
    draw: Draw
    rules_of: RulesOf
    guidance_scale: float = 0.0
    cache: Cache = "none"


class CanvasDriver:
    """One answer (`models.programs.TokenDriver`)."""

    def __init__(self, request: TokenRequest, recipe: CanvasRecipe, *, device: torch.device) -> None:
        self._request = request
        self._recipe = recipe
        self._device = device
        self._prompt: Final = len(request.prompt_ids)
        self._end: Final = self._prompt + request.max_tokens
        self._ids = [*request.prompt_ids, *request.prefix_ids]
        self._forwards = self._parallel = 0
        self._begin()
        self.max_contexts: Final = 1 + (recipe.guidance_scale > 0)
        self.max_tokens: Final = self.max_contexts * self._end

    def passes(self) -> Sequence[Pass]:
        """One pass; with guidance also that of the context whose prompt is masked."""
        return list(self._asked())

    def take(self, results: Sequence[torch.Tensor]) -> NewTokens | None:
        """Fill in some masks of the block; return its tokens when it is final."""
        block = self._block
        block.refine(self._candidates(results))
        self._is_first = False
        self._forwards += 1
        self._parallel += max(0, block.filled - 1)
        return self._finish() if block.is_done(self._request.end_ids) else None

    # ---- blocks ------------------------------------------------------------------------------------
    def _begin(self) -> None:
        """Begin the block in which the next token is."""
        length = self._recipe.block_length
        known = len(self._ids)
        self._start = known - (known - self._prompt) % length
        self._stop = min(self._start + length, self._end)
        self._generator = generator_of(self._request, self._start, self._device)
        rules = self._recipe.rules_of(self._stop - known, self._generator)
        self._block = Block(
            self._ids[self._start :], self._stop - self._start, self._recipe.mask_id, rules, self._device
        )
        self._is_first = True

    def _finish(self) -> NewTokens:
        """Return the new tokens of the final block, and begin the next one."""
        new = self._block.ids[self._block.known :]
        counts = {FORWARDS: self._forwards, PARALLEL_TOKENS: self._parallel}
        self._forwards = self._parallel = 0
        self._ids += new
        ended = self._stop == self._end or not self._request.end_ids.isdisjoint(new)
        if not ended:
            self._begin()
        return NewTokens(ids=new, ended=ended, counts=counts)

    # ---- passes ------------------------------------------------------------------------------------
    def _asked(self) -> Iterator[Pass]:
        mask_id = self._recipe.mask_id
        after, places, wanted = self._layout()
        behind = [mask_id] * (self._end - self._stop)
        is_guided = self.max_contexts > 1
        for context, prompt in contexts_of(self._request.prompt_ids, mask_id, is_guided=is_guided):
            ids = [*prompt, *self._ids[self._prompt : self._start], *self._block.ids, *behind]
            yield Pass(
                context=context,
                ids=[ids[place] for place in places],
                positions=torch.tensor(places, dtype=torch.int32),
                mask=Mask.FULL,
                after=after,
                logits=wanted,
            )

    def _layout(self) -> tuple[int, list[int], range]:
        """Return the cells that stay, the places that are computed, and the indices of the block's logits.

        A place is an index in prompt and canvas. What later steps keep comes first.
        """
        first, count = self._start - self._recipe.shifts, self._stop - self._start
        before, block = range(first), range(first, self._stop)
        behind = range(self._stop, self._end)
        match self._recipe.cache:
            case "dual":
                kept = len(before) + len(behind)
                if self._is_first:
                    return 0, [*before, *behind, *block], range(kept, kept + count)
                return kept, [*block], range(count)
            case "prefix" if not self._is_first:
                return first, [*block, *behind], range(count)
            case _:
                return 0, [*before, *block, *behind], range(first, first + count)

    # ---- candidates --------------------------------------------------------------------------------
    def _candidates(self, results: Sequence[torch.Tensor]) -> Candidates:
        recipe = self._recipe
        # In float32 the surest probabilities are all 1, and their order is lost.
        logits = guided([one.double() for one in results], recipe.guidance_scale)
        logits = without_mask(logits, recipe.mask_id)
        return recipe.draw(logits, self._request.sampling, self._generator)
