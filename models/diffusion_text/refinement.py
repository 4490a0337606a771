"""One block while it is refined: masks become tokens by their confidence, and tokens may be edited.

In each step, all masks whose candidate is surer than a threshold are filled in, and at least a quota of the
surest. With editing (LLaDA2.1), a filled token is replaced by a candidate that differs and is surer than a
second threshold; when no mask is left, editing goes on until nothing changes.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from models.diffusion_text.candidates import Candidates


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The rules of a block's refinement.

    Attributes:
        quotas: the least numbers of tokens, by step; the last one counts for later steps.
        threshold: fill in all candidates surer than this; None: only the quota.
        factor: fill in the n surest candidates, of confidences c1 >= c2 ..., for the largest n with
            (n + 1) (1 - cn) < factor (Fast-dLLM); None: only the quota.
        editing_threshold: replace a filled token by a candidate surer than this; None: tokens stand.
        max_post_steps: the most steps after the last mask.
        early_stop: end at an end token before which no mask is left.
    """

    quotas: Sequence[int]
    threshold: float | None = None
    factor: float | None = None
    editing_threshold: float | None = None
    max_post_steps: int = 16
    early_stop: bool = True


class Block:
    """L places of a block, of which the first are known: the last tokens of the prompt.

    Args:
        known: the known tokens; they are never changed, whatever they are.
        length: L.
        mask_id: of the places that are not filled in.

    Attributes:
        filled: the number of masks that the last step filled in.
    """

    def __init__(
        self, known: Sequence[int], length: int, mask_id: int, rules: Rules, device: torch.device
    ) -> None:
        masks = length - len(known)
        self.known = len(known)
        self._ids = torch.tensor([*known, *[mask_id] * masks], device=device)
        self._is_masked = torch.arange(length, device=device) >= len(known)
        self._masks = masks
        self._rules = rules
        self._steps = self._post_steps = 0
        self._is_stable = not masks
        self.filled = 0

    @property
    def ids(self) -> list[int]:
        """All L tokens; those of places that are not filled in are the mask."""
        found: list[int] = self._ids.tolist()
        return found

    def refine(self, candidates: Candidates) -> None:
        """Take one step."""
        filled = self._chosen(candidates) if self._masks else torch.zeros_like(self._is_masked)
        edited = self._edited(candidates)
        if self._masks:
            self._steps += 1
        else:
            self._post_steps += 1
            self._is_stable = not bool(edited.any())
        self._ids = torch.where(filled | edited, candidates.ids, self._ids)
        self._is_masked = self._is_masked & ~filled
        masks = int(self._is_masked.sum())
        self._masks, self.filled = masks, self._masks - masks

    def is_done(self, end_ids: Collection[int]) -> bool:
        """Return whether the block is final. An end token may end it while masks are left after it."""
        rules = self._rules
        if self._masks:
            return rules.early_stop and self._is_ended(end_ids)
        if rules.editing_threshold is None or self._is_stable:
            return True
        return self._post_steps >= rules.max_post_steps or (rules.early_stop and self._is_ended(end_ids))

    def _is_ended(self, end_ids: Collection[int]) -> bool:
        """Return whether an end token is filled in, and everything before it."""
        new = slice(self.known, None)
        for token, is_masked in zip(self.ids[new], self._is_masked[new].tolist(), strict=True):
            if is_masked:
                return False
            if token in end_ids:
                return True
        return False

    def _chosen(self, candidates: Candidates) -> torch.Tensor:
        """The masks that are filled in, (L,) bool."""
        rules = self._rules
        quota = min(rules.quotas[min(self._steps, len(rules.quotas) - 1)], self._masks)
        # A candidate of no confidence at all comes before the places that are no masks.
        least = torch.finfo(candidates.confidence.dtype).min
        confidence = candidates.confidence.clamp_min(least).masked_fill(~self._is_masked, -torch.inf)
        if rules.threshold is not None:
            sure = confidence > rules.threshold
            if int(sure.sum()) >= quota:
                return sure
        if rules.factor is not None:
            quota = max(quota, self._bounded(confidence, rules.factor))
        chosen = torch.zeros_like(self._is_masked)
        chosen[confidence.topk(quota).indices] = True
        return chosen

    def _bounded(self, confidence: torch.Tensor, factor: float) -> int:
        """The number of surest candidates whose joint error `factor` bounds."""
        ordered = confidence.sort(descending=True).values[: self._masks]
        counts = torch.arange(2, self._masks + 2, device=ordered.device)
        allowed = (counts * (1 - ordered) < factor).nonzero()
        return int(allowed.max()) + 1 if len(allowed) else 0

    def _edited(self, candidates: Candidates) -> torch.Tensor:
        """The filled tokens that are replaced, (L,) bool."""
        if self._rules.editing_threshold is None:
            return torch.zeros_like(self._is_masked)
        is_sure = candidates.confidence > self._rules.editing_threshold
        own = ~self._is_masked & (torch.arange(len(self._ids), device=self._ids.device) >= self.known)
        return own & is_sure & (candidates.ids != self._ids)
