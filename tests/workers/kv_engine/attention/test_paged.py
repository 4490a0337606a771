import os
from pathlib import Path

import numpy as np
import pytest
import torch

from shared.errors import BugError
from workers.kv_engine.attention.paged import attention_context, paged_attention
from workers.kv_engine.attention.pool import PagedPool
from workers.kv_engine.attention.span_groups import group_spans, partition
from workers.kv_engine.step import Spans


def spans(shapes: list[tuple[int, int]], block_size: int = 4) -> Spans:
    """Spans of (queries, keys), each on separate blocks."""
    counts, lengths = zip(*shapes, strict=True)
    most = -(-max(lengths) // block_size)
    return Spans(
        query_offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        kv_lengths=np.array(lengths, np.int32),
        block_tables=np.arange(len(shapes) * most, dtype=np.int32).reshape(len(shapes), most)[::-1].copy(),
        block_size=block_size,
    )


@pytest.mark.parametrize(
    ("shapes", "groups"),
    [
        ([(1, 5), (1, 9), (1, 70)], [[0, 1, 2]]),
        ([(1, 5), (30, 30), (1, 9)], [[1], [0, 2]]),
        ([(1, 60_000), (1, 10), (1, 12)], [[0], [1, 2]]),
        ([(30, 30), (28, 64), (2, 9)], [[0, 1, 2]]),
        ([(512, 512), (1024, 1024)], [[1], [0]]),
    ],
)
def test_spans_alike_are_computed_together(shapes: list[tuple[int, int]], groups: list[list[int]]) -> None:
    assert partition(spans(shapes)) == groups


def test_every_token_is_in_one_group_and_padding_stays_inside_its_span() -> None:
    random = np.random.default_rng(0)
    shapes = []
    for _ in range(60):
        queries = int(random.choice([1, 1, 1, 7, 40]))
        shapes.append((queries, queries + int(random.integers(0, 300))))
    step = spans(shapes)
    members = partition(step)
    groups = group_spans(step, device=torch.device("cpu"), dtype=torch.float32)

    tokens = torch.cat([group.tokens for group in groups])
    assert sorted(tokens.tolist()) == list(range(sum(queries for queries, _ in shapes)))
    for group, part in zip(groups, members, strict=True):
        slots = group.slots.view(group.spans, -1)
        for row, span in enumerate(part):
            own = set(
                (
                    step.block_tables[span].repeat(4) * 4
                    + np.tile(np.arange(4), len(step.block_tables[span]))
                ).tolist()
            )
            assert set(slots[row].tolist()) <= own
            queries, keys = shapes[span]
            visible = (group.mask[row, 0, :queries] == 0).sum(-1).tolist()
            assert visible == [keys - queries + index + 1 for index in range(queries)]


@pytest.mark.parametrize("window", [1, 5, 24, 1000])
def test_a_query_sees_as_many_keys_as_its_window_is_wide_and_no_others_are_gathered(window: int) -> None:
    random = np.random.default_rng(0)
    shapes = [(int(n), int(n + random.integers(0, 90))) for n in random.choice([1, 1, 7, 40], 30)]
    step = spans(shapes)
    members = partition(step, window)
    groups = group_spans(step, window, device=torch.device("cpu"), dtype=torch.float32)

    assert sorted(span for part in members for span in part) == list(range(30))
    for group, part in zip(groups, members, strict=True):
        slots = group.slots.view(group.spans, -1)
        for row, span in enumerate(part):
            queries, keys = shapes[span]
            places = {
                int(step.block_tables[span, place // 4]) * 4 + place % 4: place for place in range(keys)
            }
            for query in range(queries):
                at = keys - queries + query
                seen = [places[int(slot)] for slot in slots[row][group.mask[row, 0, query] == 0]]
                assert seen == list(range(max(0, at - window + 1), at + 1))
        longest = max(min(shapes[span][1], shapes[span][0] + window - 1) for span in part)
        assert slots.shape[1] == longest


@pytest.mark.parametrize(("heads", "queries"), [(4, 1), (4, 9), (2, 9)])
def test_scores_are_bent_below_their_cap(heads: int, queries: int) -> None:
    """Against the definition, written out: scaled, bent by tanh, masked, weighed."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, n, 9, 8, generator=generator) * 3 for n in (heads, 2, 2))
    pool = PagedPool(layers=1, kv_heads=2, head_dim=8, slots=12, device=torch.device("cpu"), dtype=k.dtype)
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


def test_attention_outside_of_a_step_is_a_bug() -> None:
    nothing = torch.zeros(1, 1, 1, 1)

    with pytest.raises(BugError, match="outside of an engine step"):
        paged_attention(torch.nn.Identity(), nothing, nothing, nothing, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fresh_pool_is_zero_and_takes_no_memory_before_it_is_used(dtype: torch.dtype) -> None:
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident_bytes()
    pool = PagedPool(layers=2, kv_heads=2, head_dim=64, slots=2**20, device=torch.device("cpu"), dtype=dtype)
    size = 4 * pool.keys[0].nbytes
    assert resident_bytes() - before < size / 10
    assert pool.keys[1].shape == (2**20, 2, 64)
    assert pool.keys[1].dtype == dtype
    assert not pool.values[1][::4096].any()
