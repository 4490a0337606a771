"""Adaptive parallel decoding (APD): a denoiser drafts left to right, a verifier accepts a prefix.

Israel et al., "Accelerating Diffusion LLMs via Adaptive Parallel Decoding", 2025. In each round

    draft     the denoiser computes the text and `lookahead` masks behind it, and samples a token for each
    verify    the verifier computes the drafts causally, over its own keys and values (a tower)
    accept    the same noise samples from the product of both distributions, p^R q^(1-R): the longest prefix
              in which both samples agree is accepted, and always the first token

The noise is Gumbel noise, also in the acceptance: with a temperature, drafts and product are coupled samples.

A *window* W lets the denoiser compute only the last tokens again, those of the last round and W - 1 before
them, behind keys that it computed in earlier rounds, when they saw other masks. Without a window, or while it
reaches back to the first token, all is computed in every round.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from models.diffusion_text.filters import filtered_logits, without_mask
from models.diffusion_text.guidance import TEXT
from models.diffusion_text.seeds import generator_of
from models.programs import Mask, NewTokens, Pass, TokenRequest
from shared.events import FORWARDS, PARALLEL_TOKENS

VERIFIER: Final = "verifier"
"""The tower of the verifier, and its context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApdSettings:
    """The knobs of APD.

    Attributes:
        denoiser_weight: R, the denoiser's share of the product: 1 accepts every draft.
        window: W; None: no keys are kept.
        lookahead: M, the most drafts of a round.
        threshold: a draft is accepted only if the product gives it at least this probability; 0 is the paper.
    """

    denoiser_weight: float = 0.7
    window: int | None = None
    lookahead: int = 100
    threshold: float = 0.0


class ApdDriver:
    """One answer (`models.programs.TokenDriver`).

    Args:
        mask_id: is never drafted, nor chosen.
        shifts: the denoiser's logits of a token are those of the next one (Dream).
        vocab_size: of both models; further logits, which pad one of them, are cut off.
    """

    def __init__(
        self,
        request: TokenRequest,
        settings: ApdSettings,
        *,
        mask_id: int,
        shifts: bool,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self._request = request
        self._settings = settings
        self._mask_id = mask_id
        self._shifts = shifts
        self._vocab_size = vocab_size
        self._device = device
        self._ids = [*request.prompt_ids, *request.prefix_ids]
        self._end: Final = len(request.prompt_ids) + request.max_tokens
        self._left = 0  # the first token that the denoiser computes in this round
        self._verified = 0  # the tokens whose keys the verifier has
        self._round: _Round | None = None
        self.max_contexts: Final = 2
        self.max_tokens: Final = 2 * self._end

    def passes(self) -> Sequence[Pass]:
        """The pass of the denoiser; then that of the verifier over its drafts."""
        return [self._draft_pass() if self._round is None else self._verify_pass(self._round)]

    def take(self, results: Sequence[torch.Tensor]) -> NewTokens | None:
        """Sample drafts of the denoiser's logits, or accept some of them by the verifier's."""
        logits = results[0][:, : self._vocab_size].float()
        if self._round is None:
            self._round = self._drafted(logits)
            if self._needs_verifier:
                return None
            return self._accept(self._round, self._agreeing(self._round, None), verified=0)
        drafts = self._round
        accepted = self._agreeing(drafts, logits)
        self._verified = len(self._ids) + min(accepted, len(drafts.ids) - 1)
        return self._accept(drafts, accepted, verified=1)

    # ---- drafts ------------------------------------------------------------------------------------
    def _draft_pass(self) -> Pass:
        known, left = len(self._ids), self._left
        right = min(known + self._settings.lookahead, self._end)
        first = known - left - self._shifts
        return Pass(
            context=TEXT,
            ids=[*self._ids[left:], *[self._mask_id] * (right - known)],
            mask=Mask.FULL,
            after=left,
            logits=range(first, first + right - known),
        )

    def _drafted(self, logits: torch.Tensor) -> "_Round":
        noise = self._noise(logits)
        shown = filtered_logits(without_mask(logits, self._mask_id), self._request.sampling)
        ids = (shown + noise).argmax(-1)
        return _Round(ids=ids.tolist(), logits=logits, noise=noise)

    def _noise(self, logits: torch.Tensor) -> torch.Tensor:
        """Gumbel noise, drawn afresh in every round; zeros without a temperature."""
        if not self._request.sampling.temperature:
            return torch.zeros_like(logits)
        generator = generator_of(self._request, len(self._ids), self._device)
        draws = torch.empty_like(logits).exponential_(generator=generator)
        return -draws.clamp_min(torch.finfo(draws.dtype).tiny).log()

    # ---- verification ------------------------------------------------------------------------------
    @property
    def _needs_verifier(self) -> bool:
        """False if all drafts are accepted anyway: there is one, or the verifier has no weight."""
        assert self._round is not None
        return len(self._round.ids) > 1 and self._settings.denoiser_weight < 1

    @property
    def _verify_start(self) -> int:
        """The first token of the verifier's pass, at most the last known one: its logits are of a draft."""
        return min(self._verified, len(self._ids) - 1)

    def _verify_pass(self, drafts: "_Round") -> Pass:
        start = self._verify_start
        first = len(self._ids) - 1 - start
        return Pass(
            context=VERIFIER,
            tower=VERIFIER,
            ids=[*self._ids[start:], *drafts.ids[:-1]],
            mask=Mask.CAUSAL,
            after=start,
            logits=range(first, first + len(drafts.ids)),
        )

    def _agreeing(self, drafts: "_Round", verifier: torch.Tensor | None) -> int:
        """The number of drafts to accept; without a verifier the product is the denoiser's distribution."""
        share, product = self._settings.denoiser_weight, drafts.logits
        if verifier is not None:
            product = share * product + (1 - share) * verifier
        shown = filtered_logits(without_mask(product, self._mask_id), self._request.sampling)
        ids = torch.tensor(drafts.ids, device=shown.device)
        agrees = (shown + drafts.noise).argmax(-1) == ids
        if self._settings.threshold:
            chances = shown.softmax(-1).gather(-1, ids[:, None])[:, 0]
            agrees &= chances >= self._settings.threshold
        agrees[0] = True
        return int(agrees.int().cumprod(0).sum())

    def _accept(self, drafts: "_Round", count: int, *, verified: int) -> NewTokens:
        """Append the first `count` drafts, and begin the next round."""
        new = drafts.ids[:count]
        known, self._round = len(self._ids), None
        self._ids += new
        if self._settings.window is not None:
            self._left = max(self._left, known - self._settings.window + 1)
        ended = len(self._ids) == self._end or not self._request.end_ids.isdisjoint(new)
        counts = {
            FORWARDS: 1,
            PARALLEL_TOKENS: len(new) - 1,
            "verifier_forwards": verified,
            "drafts": len(drafts.ids),
        }
        return NewTokens(ids=new, ended=ended, counts=counts)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Round:
    """The drafts of a round: `ids`, and (M, vocab) logits of the denoiser and noise."""

    ids: list[int]
    logits: torch.Tensor
    noise: torch.Tensor
