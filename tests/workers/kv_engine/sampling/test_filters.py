"""The searched threshold equals that of a sort, and keeps the same tokens as transformers."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.workers.kv_engine.sampling.test_sampler import rows
from workers.kv_engine.sampling.filters import WEIGHT_ONE, greatest_with, threshold
from workers.kv_engine.sequence_spec import Sampling

WIDE = 3000
"""More tokens than are ever ranked."""


def weights_of(logits: torch.Tensor) -> torch.Tensor:
    """Weights as the sampler computes them."""
    top = logits.max(-1, keepdim=True).values
    return ((logits - top).exp().double() * WEIGHT_ONE).long()


def row(kind: str, width: int = WIDE) -> torch.Tensor:
    """The weights of a row that is easy, or hard."""
    random = np.random.default_rng(len(kind))
    match kind:
        case "flat":
            return torch.full((width,), WEIGHT_ONE)
        case "one hot":
            return torch.nn.functional.one_hot(torch.tensor(width // 3), width) * WEIGHT_ONE
        case "two values":
            return torch.from_numpy(random.choice([WEIGHT_ONE, 7], width))
        case "many ties":
            return weights_of(torch.from_numpy(random.integers(0, 6, width)).float()[None])[0]
        case "one apart":  # weights that differ in the last digit only
            return WEIGHT_ONE - torch.from_numpy(random.permutation(width))
        case "tiny":
            return torch.from_numpy(random.permutation(width))
        case "edges":  # around what the digits cut
            edges = [0, 1, 2**11 - 1, 2**11, 2**11 + 1, 2**22 - 1, 2**22, 2**22 + 1, 2**32 - 1, 2**32]
            return torch.from_numpy(random.choice(edges, width))
        case "empty":  # logits that are no numbers
            return torch.zeros(width, dtype=torch.int64)
        case _:
            return weights_of(torch.from_numpy(random.standard_normal((1, width)) * float(kind)).float())[0]


KINDS = (
    "flat", "one hot", "two values", "many ties", "one apart", "tiny", "edges", "empty", "0.1", "1", "3", "9",
)  # fmt: skip


def by_sorting(weights: torch.Tensor, amounts: torch.Tensor, needed: int) -> int:
    """The definition: the first of the sorted at which the amounts suffice."""
    order = weights.argsort(descending=True)
    reached = amounts[order].cumsum(-1) >= needed
    return int(weights[order][reached.nonzero()[0, 0]])


@pytest.mark.parametrize("share", [1e-9, 0.01, 0.5, 0.9, 0.999999, 1.0])
def test_the_share_of_any_row_ends_where_a_sort_ends_it(share: float) -> None:
    weights = torch.stack([row(kind) for kind in KINDS])
    needed = (weights.sum(-1).double() * share).ceil().long()

    found = greatest_with(weights, weights, needed)

    asked = needed > 0
    expected = [by_sorting(w, w, n) for w, n in zip(weights[asked], needed[asked].tolist(), strict=True)]
    assert found[asked].tolist() == expected


@pytest.mark.parametrize("count", [1, 2, 1023, 1024, 1025, WIDE - 1, WIDE])
def test_the_largest_of_any_row_end_where_a_sort_ends_them(count: int) -> None:
    weights = torch.stack([row(kind) for kind in KINDS])

    found = greatest_with(weights, torch.ones_like(weights), torch.full((len(KINDS),), count))

    assert found.tolist() == [int(w.sort(descending=True).values[count - 1]) for w in weights]


def test_a_row_alone_and_in_slices_of_the_batch_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = torch.stack([row(kind) for kind in KINDS])
    needed = (weights.sum(-1).double() * 0.7).ceil().long()
    whole = greatest_with(weights, weights, needed).tolist()

    monkeypatch.setattr("workers.kv_engine.sampling.filters._CACHED_WEIGHTS", 5 * WIDE)

    assert greatest_with(weights, weights, needed).tolist() == whole
    assert [int(greatest_with(w[None], w[None], n[None])) for w, n in zip(weights, needed, strict=True)] == (
        whole
    )


SAMPLINGS = (
    Sampling(temperature=1, top_p=0.9),
    Sampling(temperature=0.7, top_k=40),
    Sampling(temperature=1.3, top_k=40, top_p=0.8),
    Sampling(temperature=1, min_p=0.05),
    Sampling(temperature=2, top_k=2000, top_p=0.95, min_p=0.01),
    Sampling(temperature=0.5, top_p=0.99, min_p=0.2),
    Sampling(temperature=1),
)


def stock_kept(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """The tokens of a row that transformers keeps, with the order of `generate`'s warpers."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(float(sampling.temperature))])
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    return torch.isfinite(warpers(torch.zeros(1, 1, dtype=torch.int64), logits[None])[0])


def kept(logits: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
    temperature = torch.tensor([s.temperature for s in samplings])
    weights = weights_of(logits / temperature[:, None])
    return weights >= threshold(weights, rows(samplings, [0] * len(samplings)))[:, None]


@pytest.mark.parametrize("spread", [0.5, 2.0, 6.0])
def test_filters_keep_what_those_of_transformers_keep(spread: float) -> None:
    """Rows in which no two tokens tie: of those that do, transformers drops some and we none."""
    logits = torch.from_numpy(np.random.default_rng(5).standard_normal((len(SAMPLINGS), WIDE))).float()
    logits *= spread

    together = kept(logits, SAMPLINGS)

    for place, sampling in enumerate(SAMPLINGS):
        expected = stock_kept(logits[place], sampling)
        # Sums of float32 may stop one token early or late, of thousands.
        slack = 1 if sampling.top_p < 1 else 0
        assert int((together[place] != expected).sum()) <= slack
        assert torch.equal(kept(logits[place : place + 1], [sampling])[0], together[place])


def test_a_row_keeps_the_same_whatever_makes_its_batch_rank_or_search() -> None:
    logits = torch.from_numpy(np.random.default_rng(6).standard_normal((2, WIDE))).float()
    mine = Sampling(temperature=1, top_k=30, top_p=0.8)

    beside = [
        kept(logits, [mine, other])[0]
        for other in (mine, Sampling(temperature=1, top_p=0.99), Sampling(temperature=1, top_k=2500))
    ]

    assert torch.equal(beside[0], beside[1])
    assert torch.equal(beside[0], beside[2])
