"""The sampler has the right distribution, and gives the same bits in any row."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from workers.kv_engine.sampling.sampler import NOT_A_TOKEN, node_key, sample
from workers.kv_engine.sampling.sampling_rows import SamplingRows
from workers.kv_engine.sequence_spec import Sampling

NODE = node_key("llm")
GREEDY = Sampling()


def rows(samplings: Sequence[Sampling], draws: Sequence[int]) -> SamplingRows:
    """The sampling rows of a step."""
    random = [s for s in samplings if s.temperature > 0]
    widths = [s.top_k for s in random if s.top_k > 0]
    is_wide = any(s.top_p < 1 and s.top_k <= 0 for s in random)

    def signed(value: int) -> int:
        return value - 2**32 if value >= 2**31 else value

    return SamplingRows(
        temperature=torch.tensor([s.temperature for s in samplings], dtype=torch.float32),
        top_p=torch.tensor([s.top_p for s in samplings], dtype=torch.float32),
        top_k=torch.tensor([s.top_k for s in samplings], dtype=torch.int32),
        min_p=torch.tensor([s.min_p for s in samplings], dtype=torch.float32),
        seed_low=torch.tensor([signed(s.seed & 0xFFFFFFFF) for s in samplings], dtype=torch.int32),
        seed_high=torch.tensor([s.seed >> 32 for s in samplings], dtype=torch.int32),
        sample_index=torch.tensor([s.sample_index for s in samplings], dtype=torch.int32),
        draw_index=torch.tensor(draws, dtype=torch.int32),
        is_random=bool(random),
        has_top_k=bool(widths),
        has_top_p=any(s.top_p < 1 for s in random),
        has_min_p=any(s.min_p > 0 for s in random),
        candidates=max(widths) if widths and not is_wide else None,
    )


def tokens(logits: torch.Tensor, samplings: Sequence[Sampling], draws: Sequence[int]) -> list[int]:
    return [int(t) for t in sample(logits, rows(samplings, draws), NODE).tolist()]


def closed_form(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """The distribution as the textbook has it, in float64 and by sorting."""
    shares = torch.softmax(logits.double() / sampling.temperature, -1)
    order = shares.argsort(descending=True)
    kept = order[: sampling.top_k] if sampling.top_k > 0 else order
    ranked = shares[kept] / shares[kept].sum()
    before = ranked.cumsum(-1) - ranked
    nucleus = kept[(before < sampling.top_p) & (shares[kept] >= sampling.min_p * shares.max())]
    result = torch.zeros_like(shares)
    result[nucleus] = shares[nucleus] / shares[nucleus].sum()
    return result


LOGITS = torch.tensor(np.random.default_rng(3).standard_normal(24) * 1.5, dtype=torch.float32)
DRAWS = 20_000


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0, seed=1),
        Sampling(temperature=0.5, seed=2),
        Sampling(temperature=3.0, seed=-3),
        Sampling(temperature=1.0, top_k=5, seed=4),
        Sampling(temperature=1.0, top_p=0.7, seed=5),
        Sampling(temperature=1.3, top_k=8, top_p=0.8, seed=6),
        Sampling(temperature=1.0, top_k=1000, top_p=0.999, seed=7),
        Sampling(temperature=1.0, top_k=1, seed=8),
        Sampling(temperature=1.0, top_p=1e-6, seed=2**63 - 1),
        Sampling(temperature=1.0, min_p=0.1, seed=9),
        Sampling(temperature=1.5, top_k=20, top_p=0.95, min_p=0.15, seed=10),
        Sampling(temperature=2.0, min_p=1.0, seed=11),
    ],
)
def test_the_draws_follow_the_closed_form(sampling: Sampling) -> None:
    expected = closed_form(LOGITS, sampling) * DRAWS

    drawn = tokens(LOGITS.expand(DRAWS, -1), [sampling] * DRAWS, range(DRAWS))

    counts = torch.bincount(torch.tensor(drawn), minlength=len(LOGITS)).double()
    assert counts[expected == 0].sum() == 0
    kept = expected > 0
    chi_square = float(((counts - expected)[kept] ** 2 / expected[kept]).sum())
    freedom = int(kept.sum()) - 1
    # Far beyond the 99.99th percentile (Wilson-Hilferty), and fixed by the seeds: this cannot flake.
    limit = freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3 if freedom else 0
    assert chi_square <= limit


def test_the_closed_form_test_can_fail() -> None:
    drawn = tokens(LOGITS.expand(DRAWS, -1), [Sampling(temperature=1.0)] * DRAWS, range(DRAWS))
    counts = torch.bincount(torch.tensor(drawn), minlength=len(LOGITS)).double()
    expected = closed_form(LOGITS, Sampling(temperature=1.1)) * DRAWS

    assert float(((counts - expected) ** 2 / expected).sum()) > 100


def test_greedy_is_the_exact_argmax() -> None:
    logits = torch.randn(64, 1000, generator=torch.Generator().manual_seed(0))

    assert tokens(logits, [GREEDY] * 64, [0] * 64) == logits.argmax(-1).tolist()


def test_greedy_rows_are_exact_beside_random_ones() -> None:
    logits = torch.randn(8, 50, generator=torch.Generator().manual_seed(0))
    mixed = [GREEDY, Sampling(temperature=5.0, seed=1, top_k=3)] * 4

    assert tokens(logits, mixed, [0] * 8)[::2] == logits.argmax(-1).tolist()[::2]


@pytest.mark.parametrize("place", [0, 13, 31])
def test_a_row_draws_the_same_alone_and_among_31_others(place: int) -> None:
    random = np.random.default_rng(place)
    logits = torch.tensor(random.standard_normal((32, 300)), dtype=torch.float32)
    others = [
        Sampling(
            temperature=float(random.choice([0, 0.5, 1, 2])),
            top_k=int(random.choice([0, 3, 40])),
            top_p=float(random.choice([0.5, 0.9, 1])),
            min_p=float(random.choice([0, 0.01, 0.3])),
            seed=int(random.integers(-(2**62), 2**62)),
        )
        for _ in range(32)
    ]
    draws = random.integers(0, 1000, 32).tolist()
    for mine in (
        Sampling(temperature=0.9, seed=42),
        Sampling(temperature=0.9, top_k=7, seed=42),
        Sampling(temperature=1.5, top_k=20, top_p=0.6, seed=42),
        Sampling(temperature=1.5, top_p=0.6, seed=42),
        Sampling(temperature=1.5, min_p=0.2, seed=42),
    ):
        others[place] = mine

        alone = tokens(logits[place : place + 1], [mine], [draws[place]])

        assert tokens(logits, others, draws)[place] == alone[0]


@pytest.mark.parametrize(
    "changed",
    [
        Sampling(temperature=1, seed=2),
        Sampling(temperature=1, seed=1 + 2**32),
        Sampling(temperature=1, seed=1, sample_index=1),
    ],
)
def test_seed_and_sample_index_key_the_draws(changed: Sampling) -> None:
    flat = torch.zeros(50, 1000)

    assert tokens(flat, [changed] * 50, range(50)) != tokens(
        flat, [Sampling(temperature=1, seed=1)] * 50, range(50)
    )


def test_the_node_keys_the_draws_too() -> None:
    flat = torch.zeros(50, 1000)
    same = rows([Sampling(temperature=1)] * 50, range(50))

    assert sample(flat, same, node_key("llm")).tolist() != sample(flat, same, node_key("talker")).tolist()


def test_the_bits_are_those_of_splitmix64() -> None:
    """Pinned by plain Python integers: what a recorded seed draws must never change."""

    def mix(x: int) -> int:
        mask = 2**64 - 1
        x = (x + 0x9E3779B97F4A7C15) & mask
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    vocab, seeds = 2**16, [0, 1, -1, 2**63 - 1, -(2**63), 123456789012345]
    expected = []
    for draw, seed in enumerate(seeds):
        bits = mix(mix(mix(mix(seed % 2**64) ^ (NODE % 2**64)) ^ 3) ^ draw)
        expected.append((bits >> 11) * vocab >> 53)  # equal logits: the unit interval cut evenly

    flat = torch.zeros(len(seeds), vocab)
    samplings = [Sampling(temperature=1, seed=seed, sample_index=3) for seed in seeds]

    assert tokens(flat, samplings, range(len(seeds))) == expected


def test_ties_at_the_edge_of_a_filter_are_all_kept() -> None:
    logits = torch.tensor([[2.0, 2.0, 2.0, 0.0]]).expand(500, -1)

    drawn = tokens(logits, [Sampling(temperature=1, top_k=2)] * 500, range(500))

    assert set(drawn) == {0, 1, 2}


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=1, top_p=0.9)])
@pytest.mark.parametrize("bad", [[math.nan, 1.0], [-math.inf, -math.inf], [math.inf, 0.0]])
def test_logits_that_are_no_numbers_give_no_token_in_their_row_only(
    sampling: Sampling, bad: list[float]
) -> None:
    logits = torch.tensor([bad, [5000.0, 0.0]])

    assert tokens(logits, [sampling] * 2, [0, 0]) == [NOT_A_TOKEN, 0]


def test_banned_tokens_are_never_drawn() -> None:
    logits = torch.tensor([[0.0, -math.inf, 0.0]]).expand(200, -1)

    assert 1 not in tokens(logits, [Sampling(temperature=100.0)] * 200, range(200))
