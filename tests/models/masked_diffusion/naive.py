"""The published samplers of LLaDA and Dream, restated: one text, no cache, transformers' own model.

Each step computes the whole canvas under a mask that hides nothing. Masks get no logit, so that none is left.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Forward = Callable[[torch.Tensor], torch.Tensor]
"""(T,) ids to (T, vocab) logits, float64."""


def forward_of(model: Any, mask_id: int, *, is_causal: bool = False) -> Forward:
    """Return the logits of a text, of which every token sees all others."""

    @torch.inference_mode()
    def forward(ids: torch.Tensor) -> torch.Tensor:
        hidden = torch.triu(torch.full((len(ids), len(ids)), -torch.inf), 1)
        seen = hidden if is_causal else torch.zeros(len(ids), len(ids))
        logits: torch.Tensor = model(
            input_ids=ids[None], attention_mask=seen[None, None], use_cache=False
        ).logits[0]
        logits = logits.double()
        logits[:, mask_id] = -1e9
        return logits

    return forward


@dataclass
class Found:
    """A finished canvas: its tokens without the prompt, the forwards, and the canvas after each step."""

    ids: list[int]
    forwards: int
    canvases: list[list[int]]


def llada(
    forward: Forward,
    prompt: list[int],
    mask_id: int,
    *,
    gen_length: int,
    block_length: int,
    steps: int,
    cfg_scale: float = 0.0,
    threshold: float | None = None,
    factor: float | None = None,
) -> Found:
    """LLaDA's `generate` with low-confidence remasking, and Fast-dLLM's parallel decoding."""
    canvas = torch.tensor([*prompt, *[mask_id] * gen_length])
    is_prompt = torch.arange(len(canvas)) < len(prompt)
    open_ = ~is_prompt
    blocks = -(-gen_length // block_length)
    canvases: list[list[int]] = []
    for block in range(blocks):
        first = len(prompt) + block * block_length
        last = min(first + block_length, len(canvas))
        count = last - first
        shares = [
            count // (steps // blocks) + (n < count % (steps // blocks)) for n in range(steps // blocks)
        ]
        step = 0
        while bool(open_[first:last].any()):
            logits = forward(canvas)
            if cfg_scale:
                free = canvas.masked_fill(is_prompt, mask_id)
                free_logits = forward(free)
                logits = free_logits + (cfg_scale + 1) * (logits - free_logits)
            sure, best = logits.softmax(-1).max(-1)
            sure = sure.masked_fill(~open_, -torch.inf)
            sure[last:] = -torch.inf
            order = sure.argsort(descending=True)
            number = shares[min(step, len(shares) - 1)]
            if threshold is not None:
                number = max(1, int((sure > threshold).sum()))
            if factor is not None:
                left = int(open_[first:last].sum())
                number = max(
                    [1, *[n for n in range(1, left + 1) if (n + 1) * (1 - sure[order[n - 1]]) < factor]]
                )
            chosen = order[:number]
            canvas[chosen], open_[chosen] = best[chosen], False
            canvases.append(canvas.tolist())
            step += 1
    return Found(canvas[len(prompt) :].tolist(), len(canvases), canvases)


def dream(
    forward: Forward,
    prompt: list[int],
    mask_id: int,
    *,
    max_tokens: int,
    steps: int,
    alg: str = "entropy",
    eps: float = 1e-3,
    shifts: bool = True,
) -> Found:
    """Dream's `diffusion_generate` without a temperature."""
    canvas = torch.tensor([*prompt, *[mask_id] * max_tokens])
    open_ = torch.arange(len(canvas)) >= len(prompt)
    times = torch.linspace(1, eps, steps + 1)
    canvases: list[list[int]] = []
    for step in range(steps):
        logits = forward(canvas)
        if shifts:
            logits = torch.cat([logits[:1], logits[:-1]])
        chances = logits.softmax(-1)
        sure, best = chances.max(-1)
        if alg == "topk_margin":
            ordered = chances.sort(descending=True).values
            sure = ordered[:, 0] - ordered[:, 1]
        elif alg == "entropy":
            sure = (chances * (chances + 1e-10).log()).sum(-1)
        left = int(open_.sum())
        share = left if step == steps - 1 else int(left * (1 - times[step + 1] / times[step]))
        chosen = sure.masked_fill(~open_, -torch.inf).topk(share).indices
        canvas[chosen], open_[chosen] = best[chosen], False
        canvases.append(canvas.tolist())
    return Found(canvas[len(prompt) :].tolist(), len(canvases), canvases)
