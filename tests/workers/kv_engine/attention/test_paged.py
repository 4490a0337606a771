"""Attention by torch over the paged pool, against its definition."""

import numpy as np
import pytest
import torch

from models.base import KVLayout
from shared.errors import BugError
from workers.kv_engine.attention.paged import attention_context, paged_attention
from workers.kv_engine.attention.pool import PagedPool
from workers.kv_engine.step import Spans


@pytest.mark.parametrize(("heads", "queries"), [(4, 1), (4, 9), (2, 9)])
def test_scores_are_bent_below_their_cap(heads: int, queries: int) -> None:
    """Against the definition, written out: scaled, bent by tanh, masked, weighed."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, n, 9, 8, generator=generator) * 3 for n in (heads, 2, 2))
    pool = PagedPool(
        KVLayout(layers=1, kv_heads=2, head_dim=8), slots=12, device=torch.device("cpu"), dtype=k.dtype
    )
    module = torch.nn.Identity()
    module.layer_idx = 0  # type: ignore[assignment] # as attention modules have it
    pool.keys[0][:9], pool.values[0][:9] = k[0].transpose(0, 1), v[0].transpose(0, 1)

    class Packed:
        slots = torch.arange(9 - queries, 9)
        spans = Spans(
            query_offsets=np.array([0, queries], np.int32),
            kv_lengths=np.array([9], np.int32),
            block_tables=np.array([[0, 1, 2]], np.int32),
            block_size=4,
        )

    with attention_context(pool, Packed):  # type: ignore[arg-type] # all it reads of a step
        late_q, late_k, late_v = (tensor[:, :, 9 - queries :] for tensor in (q, k, v))
        found, _ = paged_attention(module, late_q, late_k, late_v, None, scaling=0.7, softcap=2.0)

    keys, values = (cells.repeat_interleave(heads // 2, 1) for cells in (k, v))
    scores = 2 * torch.tanh(q @ keys.transpose(2, 3) * 0.7 / 2)
    scores = scores.masked_fill(torch.ones(9, 9).triu(1).bool(), float("-inf"))
    expected = (scores.softmax(-1) @ values)[:, :, 9 - queries :].transpose(1, 2)
    assert torch.allclose(found, expected, atol=1e-5)


def test_a_mask_that_the_kernel_lacks_is_left_to_torch_and_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    q, k, v = (torch.randn(1, 2, 4, 8, generator=torch.Generator().manual_seed(n)) for n in range(3))

    def causal_kernel(*_: object, **__: object) -> torch.Tensor:
        raise AssertionError("it knows no such mask")

    pool = PagedPool(
        KVLayout(layers=1, kv_heads=2, head_dim=8),
        slots=4,
        device=torch.device("cpu"),
        dtype=k.dtype,
        kernel=causal_kernel,
    )
    module = torch.nn.Identity()
    module.layer_idx = 0  # type: ignore[assignment] # as attention modules have it
    ends = np.array([1, 4, 4, 4], np.int32)  # the last three see one another

    class Packed:
        slots = torch.arange(4)
        key_ends = torch.from_numpy(ends)
        spans = Spans(
            query_offsets=np.array([0, 4], np.int32),
            kv_lengths=np.array([4], np.int32),
            block_tables=np.array([[0]], np.int32),
            block_size=4,
            key_ends=ends,
            full_starts=np.array([0, 1, 1, 1], np.int32),
        )

    for _ in range(2):
        with attention_context(pool, Packed):  # type: ignore[arg-type] # all it reads of a step
            found, _weights = paged_attention(module, q, k, v, None)

    seen = torch.arange(4)[None] < torch.from_numpy(ends)[:, None]
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2)
    assert torch.allclose(found, expected, atol=1e-5)
    assert caplog.text.count("the kernel causal_kernel is for causal masks") == 1


def test_attention_outside_of_a_step_is_a_bug() -> None:
    nothing = torch.zeros(1, 1, 1, 1)

    with pytest.raises(BugError, match="outside of an engine step"):
        paged_attention(torch.nn.Identity(), nothing, nothing, nothing, None)
