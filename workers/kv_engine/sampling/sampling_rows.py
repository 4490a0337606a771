"""Sampling parameters of one step's sampled rows, and the rows whose logprobs are reported, as tensors."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRows:
    """The sampling parameters of the step's S sampled rows, and facts about them that the host knows.

    Attributes:
        is_random: whether any row is not greedy.
        has_top_k, has_top_p, has_min_p: whether any random row uses the filter.
        candidates: the number of likeliest tokens that decide every top-k and top-p; None is all.
    """

    temperature: torch.Tensor  # (S,) float32
    top_p: torch.Tensor  # (S,) float32
    top_k: torch.Tensor  # (S,) int32
    min_p: torch.Tensor  # (S,) float32
    seed_low: torch.Tensor  # (S,) int32
    seed_high: torch.Tensor  # (S,) int32
    sample_index: torch.Tensor  # (S,) int32
    draw_index: torch.Tensor  # (S,) int32
    is_random: bool
    has_top_k: bool
    has_top_p: bool
    has_min_p: bool
    candidates: int | None

    @property
    def is_filtered(self) -> bool:
        return self.has_top_k or self.has_top_p or self.has_min_p


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRows:
    """The tokens whose log probabilities are reported: R sampled ones, and P tokens of prompts.

    Attributes:
        top: the largest number of likeliest tokens that any of them reports.
    """

    sampled: torch.Tensor  # (R,) int64, of the S sampled rows
    prompt_indices: torch.Tensor  # (P,) int64, packed tokens before the scored ones
    prompt_ids: torch.Tensor  # (P,) int64, the scored tokens
    top: int
