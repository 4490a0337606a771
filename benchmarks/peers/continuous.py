"""The peer for transformers' continuous batching: in process, streamed."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig

from benchmarks.peers.protocol import Answer, Ready, drive

_BLOCKS = 64
_BLOCK_TOKENS = 256
_STEP_TOKENS = 2048
_SILENCE_S = 300.0


@contextmanager
def _loaded(checkpoint: Path) -> Iterator[Ready]:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).eval()
    model.generation_config.eos_token_id = -1
    config = ContinuousBatchingConfig(
        page_size=_BLOCK_TOKENS, num_blocks=_BLOCKS, max_batch_tokens=_STEP_TOKENS
    )
    keys = count()
    with model.continuous_batching_context_manager(continuous_batching_config=config, timeout=5) as manager:

        def ask(prompts: list[list[int]], max_tokens: int) -> list[Answer]:
            begun_s = time.perf_counter()
            answers = {str(next(keys)): Answer() for _ in prompts}
            for key, ids in zip(answers, prompts, strict=True):
                manager.add_request(ids, request_id=key, max_new_tokens=max_tokens, streaming=True)
            while any(len(answer.ids) < max_tokens for answer in answers.values()):
                output = manager.get_result(timeout=_SILENCE_S)
                if output is None or output.error is not None:
                    raise RuntimeError(f"expected a token, found {output!r}")
                answer = answers[output.request_id]
                new = output.generated_tokens[len(answer.ids) :]
                answer.arrivals += [time.perf_counter() - begun_s] * len(new)
                answer.ids += new
            return list(answers.values())

        command = (
            f"model.continuous_batching_context_manager(page_size={_BLOCK_TOKENS}, num_blocks={_BLOCKS}, "
            f"max_batch_tokens={_STEP_TOKENS})"
        )
        yield Ready(ask, command, ("transformers", "torch"))


if __name__ == "__main__":
    drive(_loaded)
