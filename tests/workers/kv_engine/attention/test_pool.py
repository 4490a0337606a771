"""The KV pool's memory."""

import os
from pathlib import Path

import pytest
import torch

from models.base import KVLayout
from workers.kv_engine.attention.pool import PagedPool


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fresh_pool_is_zero_and_takes_no_memory_before_it_is_used(dtype: torch.dtype) -> None:
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident_bytes()
    pool = PagedPool(
        KVLayout(layers=2, kv_heads=2, head_dim=64), slots=2**20, device=torch.device("cpu"), dtype=dtype
    )
    size = 4 * pool.keys[0].nbytes
    assert resident_bytes() - before < size / 10
    assert pool.keys[1].shape == (2**20, 2, 64)
    assert pool.keys[1].dtype == dtype
    assert not pool.values[1][::4096].any()
