"""Logits are changed as transformers' processors, and OpenAI's formula, change them."""

from collections.abc import Sequence as Items
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from workers.kv_engine.sampling.logits_processors import adjust
from workers.kv_engine.sampling.sampling_state import SamplingState
from workers.kv_engine.sequence import Sequence
from workers.kv_engine.sequence_spec import Sampling, SequenceSpec

VOCAB = 200
CPU = torch.device("cpu")
PROMPT = [5, 7, 7, 9, 3]
EOS = 2


def sequence(
    sampling: Sampling, *, row: int = 0, prefix: Items[int] = (), stops: Items[int] = (), spoken: bool = True
) -> Sequence:
    made = Sequence(
        SequenceSpec(
            key=str(row),
            prompt_ids=list(PROMPT),
            prefix_ids=list(prefix),
            max_tokens=100,
            eos_ids=frozenset([EOS]),
            ignore_eos=not spoken,
            stop_token_ids=frozenset(stops),
            sampling=sampling,
        )
    )
    made.row = row
    return made


def random_logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((rows, VOCAB)) * 4).float()


def adjusted(
    logits: torch.Tensor, sequences: Items[Sequence], state: SamplingState | None = None
) -> torch.Tensor:
    changed = logits.clone()
    rows = (state or SamplingState(len(sequences), CPU)).adjustments(sequences)
    if rows is not None:
        adjust(changed, rows)
    return changed


def stock(logits: torch.Tensor, of: Sequence) -> torch.Tensor:
    """The same row by transformers, in the order of its `generate`; presence and frequency by formula."""
    sampling, ids = of.spec.sampling, torch.tensor([of.ids])
    processors = LogitsProcessorList()
    if sampling.logit_bias:
        processors.append(SequenceBiasLogitsProcessor([[[id], float(b)] for id, b in sampling.logit_bias]))
    if sampling.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(float(sampling.repetition_penalty)))
    found = processors(ids, logits[None])[0]
    counts = torch.bincount(torch.tensor(of.ids[len(PROMPT) :], dtype=torch.int64), minlength=VOCAB)
    found = found - sampling.presence_penalty * (counts > 0) - sampling.frequency_penalty * counts
    processors = LogitsProcessorList()
    if sampling.bad_words:
        words = [list(word) for word in sampling.bad_words]
        processors.append(NoBadWordsLogitsProcessor(words, eos_token_id=sorted(of.spec.eos_ids)))
    if sampling.min_tokens:
        ends = sorted(of.spec.end_ids)
        processors.append(MinNewTokensLengthLogitsProcessor(len(PROMPT), sampling.min_tokens, ends))
    banned: torch.Tensor = processors(ids, found[None])[0]
    return banned


SAMPLINGS = (
    Sampling(),
    Sampling(logit_bias=[(0, 100.0), (7, -100.0), (199, 0.25)]),
    Sampling(repetition_penalty=1.3),
    Sampling(repetition_penalty=0.7),
    Sampling(presence_penalty=1.5),
    Sampling(frequency_penalty=-0.7),
    Sampling(presence_penalty=-2, frequency_penalty=2),
    Sampling(bad_words=[[11], [EOS], [9, 3, 40], [3, 41], [4, 42], [1, 2, 3, 5, 7, 7, 9, 3, 43], [3, EOS]]),
    Sampling(min_tokens=6),
    Sampling(
        logit_bias=[(7, 3.5), (11, -1.0), (EOS, 50.0)],
        repetition_penalty=1.7,
        presence_penalty=0.3,
        frequency_penalty=0.9,
        bad_words=[[12], [11, 12], [11, 11, 13]],
        min_tokens=9,
    ),
)
SPOKEN = [11, 7, 11, 11, 60, 9, 3, 11, EOS, 8, 11, 11]
"""An answer as it grows, with tokens that do not depend on logits."""


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_growing_answer_is_adjusted_as_transformers_does(sampling: Sampling) -> None:
    grown, state = sequence(sampling, stops=[50, 51]), SamplingState(1, CPU)
    for step, token in enumerate(SPOKEN):
        logits = random_logits(1, seed=step)

        found = adjusted(logits, [grown], state)

        torch.testing.assert_close(found[0], stock(logits[0], grown), rtol=1e-6, atol=1e-6)
        grown.ids.append(token)


def test_every_sampling_changes_something() -> None:
    """Negative control for the test above: a state without marks does not pass."""
    for sampling in SAMPLINGS[1:]:
        grown = sequence(sampling, prefix=SPOKEN[:3])
        logits = random_logits(1)

        assert not torch.equal(adjusted(logits, [grown]), logits)


@pytest.mark.parametrize("place", [0, 13, 31])
def test_a_row_is_adjusted_the_same_alone_and_among_31_others(place: int) -> None:
    random = np.random.default_rng(place)
    others = [
        sequence(
            SAMPLINGS[random.integers(len(SAMPLINGS))],
            row=row,
            prefix=random.integers(0, VOCAB, random.integers(0, 90)).tolist(),
        )
        for row in range(32)
    ]
    logits = random_logits(32)
    for sampling in SAMPLINGS:
        others[place] = sequence(sampling, row=place, prefix=SPOKEN)

        alone = adjusted(logits[place : place + 1], [replace_row(others[place], 0)])

        assert torch.equal(adjusted(logits, others)[place], alone[0])


def replace_row(other: Sequence, row: int) -> Sequence:
    made = Sequence(other.spec)
    made.row = row
    return made


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_an_answer_that_is_resumed_is_adjusted_as_if_nothing_had_happened(sampling: Sampling) -> None:
    grown, state = sequence(sampling), SamplingState(1, CPU)
    for token in SPOKEN:
        adjusted(random_logits(1), [grown], state)
        grown.ids.append(token)
    logits = random_logits(1)

    resumed = adjusted(logits, [sequence(sampling, prefix=SPOKEN)])

    assert torch.equal(adjusted(logits, [grown], state), resumed)


def test_a_row_that_another_sequence_takes_says_nothing_of_the_one_before() -> None:
    state, logits = SamplingState(1, CPU), random_logits(1)
    adjusted(logits, [sequence(SAMPLINGS[-1], prefix=SPOKEN)], state)
    follower = sequence(Sampling(frequency_penalty=1.0), prefix=[60])

    found = adjusted(logits, [follower], state)

    assert torch.equal(found[0], stock(logits[0], follower))


def test_states_that_outgrow_the_table_keep_what_they_say() -> None:
    sampling = Sampling(repetition_penalty=1.2, frequency_penalty=0.5)
    rows = [sequence(sampling, row=0, prefix=[9, 9]), sequence(sampling, row=1)]
    state, logits = SamplingState(2, CPU), random_logits(2)
    adjusted(logits, rows, state)
    before = state.nbytes
    rows[1].ids += range(VOCAB)

    found = adjusted(logits, rows, state)

    assert state.nbytes == 3 * 4 * 2 * 256 > before
    for place, row in enumerate(rows):
        torch.testing.assert_close(found[place], stock(logits[place], row), rtol=1e-6, atol=1e-6)


def test_who_asks_for_nothing_has_no_state_and_takes_no_memory() -> None:
    state = SamplingState(64, CPU)

    assert state.adjustments([sequence(Sampling(temperature=1, top_p=0.5, min_p=0.1), row=3)]) is None
    assert state.adjustments([]) is None
    assert state.nbytes == 0


def test_only_rows_that_ask_are_changed() -> None:
    logits = random_logits(3)
    asking = sequence(Sampling(logit_bias=[(1, 9.0)]), row=2)

    found = adjusted(logits, [sequence(Sampling(), row=0), asking, sequence(Sampling(), row=1)])

    assert (found != logits).nonzero().tolist() == [[1, 1]]


def test_ends_that_end_nothing_are_not_held_back() -> None:
    """With `ignore_eos` the end-of-sequence token is one like any other; `stop_token_ids` still end."""
    logits = random_logits(1)

    found = adjusted(logits, [sequence(Sampling(min_tokens=3), stops=[50], spoken=False)])

    assert torch.isinf(found).nonzero().tolist() == [[0, 50]]


def test_min_tokens_counts_the_tokens_of_an_earlier_attempt() -> None:
    logits = random_logits(1)
    sampling = Sampling(min_tokens=3)

    assert torch.isinf(adjusted(logits, [sequence(sampling, prefix=[8, 8])])).any()
    assert not torch.isinf(adjusted(logits, [sequence(sampling, prefix=[8, 8, 8])])).any()


def test_a_spec_says_whether_it_adjusts() -> None:
    plain = SequenceSpec(key="a", prompt_ids=[1], max_tokens=1)

    assert not plain.adjusts_logits
    assert not replace(plain, sampling=Sampling(min_tokens=5)).adjusts_logits  # there is no end to hold back
    assert replace(plain, sampling=Sampling(min_tokens=5), stop_token_ids=frozenset([1])).adjusts_logits


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(repetition_penalty=1.3),
        Sampling(frequency_penalty=0.5),
        Sampling(length_decay=(0, 1.5)),
        Sampling(length_decay=(9, 1.5), repetition_penalty=1.3),
    ],
)
def test_tokens_that_the_model_excludes_stay_excluded(sampling: Sampling) -> None:
    """Some models set logits to minus infinity themselves, such as a talker those of its text."""
    logits = random_logits(1)
    excluded = [EOS, 7, 150]
    logits[0, excluded] = -torch.inf

    found = adjusted(logits, [sequence(sampling, prefix=[11, 7])])

    assert not found.isnan().any()
    assert found[0, excluded].tolist() == [-torch.inf] * 3
