"""The token program of block diffusion models: blocks of masks are refined behind the keys of finished ones.

A token sees its own block in both directions, and all earlier blocks. So the keys and values of a finished
block are exact, and never computed again. They are committed by the first step of the next block: its pass
begins with the finished tokens, and the following passes begin after them.

    first pass of a block     [finished block | masks]   frames of a block's length
    further passes            [block so far]             behind the finished ones
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from models.block_diffusion.options import BlockDiffusionOptions
from models.diffusion_text.candidates import Candidates, Draw
from models.diffusion_text.filters import without_mask
from models.diffusion_text.guidance import FREE, contexts_of, guided
from models.diffusion_text.refinement import Block, Rules
from models.diffusion_text.schedule import Schedule
from models.diffusion_text.seeds import generator_of
from models.programs import Mask, NewTokens, Pass, TokenRequest
from shared.events import FORWARDS, PARALLEL_TOKENS

_CHUNK: Final = 1024
"""The most tokens of a prompt in one pass, besides those of a block: a pass is not split."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The sampler of the models of one kind.

    Attributes:
        mask_id: the token of a place that is not filled in. It is never an answer.
        block_length: of the trained model.
        begins_at_prompt: blocks are counted back from the end of the prompt, whose first block is short.
            Otherwise they are counted from the first token, and the last one of the prompt is completed.
        draw, schedule: as the published sampler has them.
        threshold: the published confidence threshold; None: none.
    """

    mask_id: int
    block_length: int
    begins_at_prompt: bool
    draw: Draw
    schedule: Schedule
    threshold: float | None


class BlockDriver:
    """One answer (`models.programs.TokenDriver`).

    Args:
        max_positions: the longest text; a last block is shortened to it.
    """

    def __init__(
        self,
        request: TokenRequest,
        options: BlockDiffusionOptions,
        recipe: Recipe,
        *,
        device: torch.device,
        max_positions: int,
    ) -> None:
        self._request = request
        self._options = options
        self._recipe = recipe
        self._device = device
        self._length: Final = options.block_length or recipe.block_length
        self._prompt: Final = len(request.prompt_ids)
        self._first: Final = self._prompt % self._length if recipe.begins_at_prompt else 0
        self._end: Final = self._prompt + request.max_tokens
        self._limit: Final = self._end if recipe.begins_at_prompt else max_positions
        self._ids = [*request.prompt_ids, *request.prefix_ids]
        self._kept = 0  # the tokens whose keys are in the contexts
        self._forwards = self._parallel = 0
        self._begin()
        last = self._first + -(-(self._end - self._first) // self._length) * self._length
        contexts = 1 + (options.guidance_scale > 0)
        self.max_contexts: Final = contexts
        self.max_tokens: Final = contexts * min(last, self._limit)

    def passes(self) -> Sequence[Pass]:
        """One pass; with guidance also that of the context without the prompt."""
        return list(self._asked())

    def take(self, results: Sequence[torch.Tensor]) -> NewTokens | None:
        """Refine the block by the logits of its tokens; return it when it is final."""
        self._forwards += 1
        if self._commits_only:
            self._kept = self._commit_end
            return None
        self._kept = self._start
        self._block.refine(self._candidates(results))
        self._parallel += max(0, self._block.filled - 1)
        return self._finish() if self._block.is_done(self._request.end_ids) else None

    # ---- blocks ------------------------------------------------------------------------------------
    def _begin(self) -> None:
        """Begin the block in which the next token is."""
        options, recipe = self._options, self._recipe
        known = len(self._ids)
        self._start = known - (known - self._first) % self._length
        length = min(self._length, self._limit - self._start)
        threshold = recipe.threshold if options.confidence_threshold is None else options.confidence_threshold
        is_parallel = options.parallel_decoding and options.remasking == "low_confidence"
        rules = Rules(
            quotas=recipe.schedule(length, options.steps or self._length),
            threshold=threshold if is_parallel else None,
            editing_threshold=options.editing_threshold,
            max_post_steps=options.max_post_steps,
            early_stop=options.early_stop,
        )
        self._is_short = length != self._length
        self._block = Block(self._ids[self._start :], length, recipe.mask_id, rules, self._device)
        self._generator = generator_of(self._request, self._start, self._device)

    def _finish(self) -> NewTokens:
        """Return the new tokens of the final block, and begin the next one."""
        block = self._block.ids
        new = block[self._block.known :][: self._end - len(self._ids)]
        counts = {FORWARDS: self._forwards, PARALLEL_TOKENS: self._parallel}
        self._forwards = self._parallel = 0
        self._ids += new
        ended = len(self._ids) == self._end or not self._request.end_ids.isdisjoint(new)
        if not ended:
            self._begin()
        return NewTokens(ids=new, ended=ended, counts=counts)

    # ---- passes ------------------------------------------------------------------------------------
    @property
    def _commit_end(self) -> int:
        """The end of the tokens that the next pass commits, if it computes no block."""
        return self._first if self._kept < self._first else min(self._start, self._kept + self._chunk)

    @property
    def _chunk(self) -> int:
        return max(1, _CHUNK // self._length) * self._length

    @property
    def _commits_only(self) -> bool:
        """True if the next pass only commits finished tokens: a pass has frames of one length."""
        pending = self._start - self._kept
        return self._kept < self._first or pending > self._chunk or (pending > 0 and self._is_short)

    def _asked(self) -> Iterator[Pass]:
        mask_id, kept = self._recipe.mask_id, self._kept
        is_guided = self.max_contexts > 1
        for context, prompt in contexts_of(self._request.prompt_ids, mask_id, is_guided=is_guided):
            ids = [*prompt, *self._ids[self._prompt :]]
            if self._commits_only:
                yield self._pass(context, ids[kept : self._commit_end], commits=True)
                continue
            block = self._block.ids
            if context == FREE:
                block = [*ids[self._start :], *block[self._block.known :]]
            pending = self._start - kept
            yield self._pass(
                context, [*ids[kept : self._start], *block], logits=range(pending, pending + len(block))
            )

    def _pass(
        self, context: str, ids: Sequence[int], *, commits: bool = False, logits: range | None = None
    ) -> Pass:
        is_one_block = len(ids) <= self._length
        return Pass(
            context=context,
            ids=ids,
            mask=Mask.FULL if is_one_block else Mask.FRAMES,
            frame_tokens=0 if is_one_block else self._length,
            commits=commits,
            after=self._kept,
            logits=logits,
        )

    # ---- candidates --------------------------------------------------------------------------------
    def _candidates(self, results: Sequence[torch.Tensor]) -> Candidates:
        logits = guided([one.float() for one in results], self._options.guidance_scale)
        logits = without_mask(logits, self._recipe.mask_id)
        found = self._recipe.draw(logits, self._request.sampling, self._generator)
        if self._options.remasking == "random":
            confidence = torch.rand(len(found.ids), generator=self._generator, device=self._device)
            return Candidates(found.ids, confidence)
        return found
