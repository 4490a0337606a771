"""Sampling parameters of one step's sampled rows, and the rows whose logprobs are reported, as tensors."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRows:
    """The step's S sampled rows, and what the host knows of them without asking the device.

    Attributes:
        is_random: whether any of them is not greedy.
        has_top_k, has_top_p, has_min_p: whether any of the random ones has one.
        candidates: how many of the likeliest tokens decide every top-k and top-p; None is all of them.
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
    """Of which tokens it is told what the model thought: R sampled ones, and P of prompts.

    Attributes:
        top: the most of the likeliest tokens that any of them wants named.
    """

    sampled: torch.Tensor  # (R,) int64, of the S sampled rows
    prompt_indices: torch.Tensor  # (P,) int64, packed tokens: behind each stands a prompt's next
    prompt_ids: torch.Tensor  # (P,) int64, that next token
    top: int
