"""Optimization of the small language models: optimizers, learning rate, steps, and the record of a run."""

import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """The learning rate by step: linear warm-up, then half a cosine down to zero.

    Attributes:
        peak: the highest rate.
        warm_up: the steps up to it.
        weight_decay: of the layers' matrices.
    """

    peak: float
    warm_up: int
    weight_decay: float

    def at(self, step: int, steps: int) -> float:
        """Return the learning rate of a step, of so many."""
        if step < self.warm_up:
            return self.peak * (step + 1) / self.warm_up
        return self.peak * 0.5 * (1 + math.cos(math.pi * (step - self.warm_up) / (steps - self.warm_up)))


def build_optimizers(model: Qwen3ForCausalLM, rates: Rates) -> tuple[torch.optim.Optimizer, ...]:
    """Make the optimizers: Muon for the layers' matrices, AdamW for the embedding and the norms.

    Measured with the demo after 614,000 tokens in the same time on one core: a loss of 0.80; with AdamW
    alone, 1.38.
    """
    layers = [weight for weight in model.model.layers.parameters() if weight.ndim > 1]
    taken = {id(weight) for weight in layers}
    others = [weight for weight in model.parameters() if id(weight) not in taken]
    muon = torch.optim.Muon(
        layers, lr=rates.peak, weight_decay=rates.weight_decay, adjust_lr_fn="match_rms_adamw"
    )
    return muon, torch.optim.AdamW(others, lr=rates.peak, betas=(0.9, 0.95), weight_decay=0.0)


def optimized(
    model: Qwen3ForCausalLM, next_loss: Callable[[], Tensor], rates: Rates, steps: int
) -> Iterator[float]:
    """Yield the loss of each step; one optimizer step per item."""
    optimizers = build_optimizers(model, rates)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    model.train()
    for step in range(steps):
        for group in groups:
            group["lr"] = rates.at(step, steps)
        loss = next_loss()
        model.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        yield loss.item()


def record_of(found: Iterator[float], *, seed: int, steps: int) -> dict[str, Any]:
    """Run the steps that yield losses, with a line for every 50, and return the record of the run."""
    began = time.monotonic()
    losses: list[float] = []
    for loss in found:
        losses.append(loss)
        if len(losses) % 50 == 0:
            mean = sum(losses[-50:]) / 50
            sys.stdout.write(f"step {len(losses)}  loss {mean:.4f}  {time.monotonic() - began:.0f} s\n")
            sys.stdout.flush()
    return {
        "seed": seed,
        "steps": steps,
        "first_losses": [round(loss, 4) for loss in losses[:3]],
        "last_loss": round(sum(losses[-50:]) / len(losses[-50:]), 5),
        "seconds": round(time.monotonic() - began),
        "torch": torch.__version__,
    }
