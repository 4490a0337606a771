"""Groups of spans, their padding, and the keys that they gather."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from workers.kv_engine.attention.span_groups import Sight, group_spans, partition
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
        assert group.mask is not None
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
    members = partition(step, Sight(window))
    groups = group_spans(step, window, device=torch.device("cpu"), dtype=torch.float32)

    assert sorted(span for part in members for span in part) == list(range(30))
    for group, part in zip(groups, members, strict=True):
        assert group.mask is not None
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


@pytest.mark.parametrize("chunk", [1, 5, 24, 1000])
def test_a_query_sees_the_keys_of_its_chunk_alone(chunk: int) -> None:
    random = np.random.default_rng(0)
    shapes = [(int(n), int(n + random.integers(0, 90))) for n in random.choice([1, 1, 7, 40], 30)]
    step = spans(shapes)
    members = partition(step, Sight(chunk=chunk))
    groups = group_spans(step, chunk=chunk, device=torch.device("cpu"), dtype=torch.float32)

    for group, part in zip(groups, members, strict=True):
        assert group.mask is not None
        slots = group.slots.view(group.spans, -1)
        for row, span in enumerate(part):
            queries, keys = shapes[span]
            places = {
                int(step.block_tables[span, place // 4]) * 4 + place % 4: place for place in range(keys)
            }
            for query in range(queries):
                at = keys - queries + query
                seen = [places[int(slot)] for slot in slots[row][group.mask[row, 0, query] == 0]]
                assert seen == list(range(at // chunk * chunk, at + 1))


def whole(shapes: list[tuple[int, int]], causal: tuple[int, ...] = ()) -> Spans:
    """Spans whose tokens see all keys, but for those at the indices `causal`."""
    step = spans(shapes)
    ends = [
        np.arange(keys - queries, keys) + 1 if index in causal else np.full(queries, keys)
        for index, (queries, keys) in enumerate(shapes)
    ]
    starts = [np.full(queries, keys - queries) for queries, keys in shapes]
    return replace(
        step,
        key_ends=np.concatenate(ends).astype(np.int32),
        full_starts=np.concatenate(starts).astype(np.int32),
    )


@pytest.mark.parametrize(
    ("step", "window", "masked"),
    [
        (whole([(40, 50)]), None, [False]),
        (whole([(40, 50), (40, 50)]), None, [False]),
        (whole([(40, 50), (30, 50)]), None, [False]),  # padded queries repeat one that sees the same
        (whole([(40, 50), (40, 60)]), None, [True]),
        (whole([(500, 510), (500, 530)]), None, [False, False]),
        (whole([(500, 510), (500, 510)], causal=(1,)), None, [True]),
        (whole([(500, 510), (480, 530)], causal=(1,)), None, [False, True]),
        (whole([(40, 50)]), 45, [True]),
        (whole([(1, 50)]), None, [True]),
        (whole([(40, 50)], causal=(0,)), None, [True]),
    ],
)
def test_spans_whose_tokens_see_all_keys_have_no_mask(
    step: Spans, window: int | None, masked: list[bool]
) -> None:
    groups = group_spans(step, window, device=torch.device("cpu"), dtype=torch.float32)
    assert [group.mask is not None for group in groups] == masked
