"""The sampler of an engine: one kernel on a GPU, torch elsewhere; the tokens are the same."""

import torch

from workers.kv_engine.attention.kernels import default_kernel
from workers.kv_engine.sampling import sampler
from workers.kv_engine.sampling.sampling_rows import SamplingRows


def sample(logits: torch.Tensor, rows: SamplingRows, node: int) -> torch.Tensor:
    """Return the next token of each row, as `workers.kv_engine.sampling.sampler.sample` does.

    For random rows torch takes some 300 launches, so on a GPU a Triton kernel samples them
    (`workers.kv_engine.gpu.triton_sampler`).
    """
    if rows.is_random and logits.is_cuda and default_kernel("cuda") is not None:
        from workers.kv_engine.gpu.triton_sampler import sample_rows  # noqa: PLC0415 - needs Triton

        return sample_rows(logits, rows, node)
    return sampler.sample(logits, rows, node)
