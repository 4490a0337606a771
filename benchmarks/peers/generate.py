"""The peer for transformers' `generate`: all prompts as one batch, as slow as the longest answer."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, StoppingCriteriaList

from benchmarks.peers.protocol import Answer, Ready, drive


@contextmanager
def _loaded(checkpoint: Path) -> Iterator[Ready]:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).eval()
    model.generation_config.eos_token_id = None

    def ask(prompts: list[list[int]], max_tokens: int) -> list[Answer]:
        """Time tokens in a stopping criterion, called after every step; a streamer takes one prompt only."""
        steps: list[float] = []
        begun_s = time.perf_counter()

        def seen(ids: Any, scores: Any, **kwargs: Any) -> torch.Tensor:
            steps.append(time.perf_counter() - begun_s)
            return torch.zeros(len(prompts), dtype=torch.bool)

        ids = torch.tensor(prompts)
        found = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_tokens,
            stopping_criteria=StoppingCriteriaList([seen]),
        )
        return [Answer(arrivals=steps, ids=row) for row in found[:, ids.shape[1] :].tolist()]

    yield Ready(ask, "model.generate(ids, do_sample=False)", ("transformers", "torch"))


if __name__ == "__main__":
    drive(_loaded)
