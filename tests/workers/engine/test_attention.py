import os
from pathlib import Path

import numpy as np
import pytest
import torch

from shared.errors import BugError
from workers.engine.attention import PagedPool, group_spans, paged_attention, partition
from workers.engine.step import Spans


def spans(shapes: list[tuple[int, int]], block_size: int = 4) -> Spans:
    """Spans of (queries, keys), each on blocks of its own."""
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
