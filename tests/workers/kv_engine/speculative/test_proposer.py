"""Speculation gives the same answers in fewer steps."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from models.decoder_lm.nodes import DecoderLM, load
from tests.tiny import tiny_checkpoint
from tests.workers.kv_engine.engines import make_engine
from tests.workers.kv_engine.oracle import ids, prompts, run
from workers.kv_engine.engine import KVEngine
from workers.kv_engine.sequence import DraftLength, Sequence
from workers.kv_engine.sequence_spec import Sampling, SequenceSpec
from workers.kv_engine.speculative.draft_model import DraftModel
from workers.kv_engine.speculative.proposer import PromptLookup, Proposer

RANDOM = Sampling(temperature=0.8, top_k=30, seed=5)


def spec(key: str, prompt: list[int], **changes: Any) -> SequenceSpec:
    values: dict[str, Any] = {"key": key, "prompt_ids": prompt, "max_tokens": 24}
    return SequenceSpec(**(values | changes))


def engine(node: DecoderLM, proposer: Proposer | None = None, **changes: Any) -> KVEngine:
    sizes: dict[str, Any] = {"num_blocks": 300, "block_size": 8, "max_step_tokens": 160, "max_sequences": 32}
    return make_engine(node, proposer=proposer, **(sizes | changes))


def draft(node: DecoderLM, **changes: Any) -> DraftModel:
    sizes = {"num_blocks": 300, "block_size": 8, "max_sequences": 32, "max_step_tokens": 160}
    return DraftModel(node, served="llm", **(sizes | changes))


def mixed(count: int) -> list[SequenceSpec]:
    """Greedy, random, penalised and scored ones, of which the last two may not speculate."""
    kinds: list[dict[str, Any]] = [
        {},
        {"sampling": RANDOM},
        {"sampling": replace(RANDOM, presence_penalty=0.5)},
        {"logprobs": 2},
    ]
    return [
        spec(str(number), text * 2, **kinds[number % 4])
        for number, text in enumerate(prompts(count, seed=3, shortest=4, longest=12))
    ]


@pytest.fixture(scope="module")
def noisy() -> DecoderLM:
    """A model that mostly thinks as the served one does."""
    node = load(tiny_checkpoint("qwen3"))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in node._model.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.01 * float(weight.std()))
    return node


# ---- proposers ---------------------------------------------------------------------------------


def guesses(text: list[int], most: int = 4) -> list[int]:
    return PromptLookup().propose([Sequence(spec("a", text))], [most])[0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ([1, 2, 3, 4, 5, 9, 1, 2, 3], [4, 5, 9, 1]),
        ([7, 1, 2, 5, 8, 1, 2], [5, 8, 1, 2]),
        ([1, 2, 4, 9, 1, 2, 5, 9, 1, 2], [5, 9, 1, 2]),
        ([9, 1, 2, 4, 3, 1, 2, 5, 9, 1, 2], [4, 3, 1, 2]),
        ([1, 2, 3], []),
        ([5, 5, 5, 5], [5]),
        ([1], []),
    ],
    ids=["three the same", "two the same", "the last time", "three before two", "nothing", "itself", "one"],
)
def test_what_followed_the_same_tokens_is_guessed(text: list[int], expected: list[int]) -> None:
    assert guesses(text) == expected


def test_a_lookup_goes_on_with_its_sequence_and_forgets_it_when_it_is_gone() -> None:
    lookup = PromptLookup()
    sequence = Sequence(spec("a", [1, 2, 3, 4]))
    assert lookup.propose([sequence], [4]) == [[]]
    sequence.ids += [1, 2, 3]
    assert lookup.propose([sequence], [1]) == [[4]]
    lookup.forget("a")
    lookup.forget("a")
    assert lookup.propose([Sequence(spec("a", [8, 9]))], [4]) == [[]]


def test_luck_doubles_when_all_stood_and_halves_when_not() -> None:
    luck = DraftLength(8)
    for guessed, stood, expected in (
        (8, 3, 4),
        (4, 0, 2),
        (2, 1, 1),
        (1, 0, 1),
        (0, 0, 1),
        (1, 1, 2),
        (2, 2, 4),
    ):
        luck.update(drafted=guessed, accepted=stood)
        assert luck.current == expected


# ---- the answer ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("who", ["lookup", "the same model", "a model much like it"])
@pytest.mark.parametrize("num_blocks", [300, 24])
def test_every_answer_is_what_it_is_without_guesses(
    qwen3: DecoderLM, noisy: DecoderLM, who: str, num_blocks: int
) -> None:
    requests = mixed(32)
    proposer: Proposer = PromptLookup()
    if who != "lookup":
        proposer = draft(qwen3 if who == "the same model" else noisy)
    expected = run(engine(qwen3), requests)

    guessing = engine(qwen3, proposer, num_blocks=num_blocks)
    found = run(guessing, requests)

    for one in requests:
        assert ids(found[one.key]) == ids(expected[one.key]), one.key
        assert [output.index for output in found[one.key]] == list(range(len(found[one.key])))
        assert [output.finish for output in found[one.key]] == [o.finish for o in expected[one.key]]
    assert guessing.stats().kv_used == 0


@pytest.mark.slow
def test_a_model_that_guesses_its_own_tokens_takes_a_fraction_of_the_steps(qwen3: DecoderLM) -> None:
    for sampling in (Sampling(), RANDOM):
        guessing = engine(qwen3, draft(qwen3), speculative_tokens=4)
        answer = ids(run(guessing, [spec("a", [3, 1, 4, 1, 5], max_tokens=31, sampling=sampling)])["a"])
        counts = guessing.stats().cache
        assert len(answer) == 31
        assert counts.accepted == counts.drafted == 24
        assert guessing.forwards == 1 + 6  # the prompt's step, and six of four drafts and one more token


@pytest.mark.slow
def test_a_model_much_like_it_is_mostly_right_also_with_random_draws(
    qwen3: DecoderLM, noisy: DecoderLM
) -> None:
    guessing = engine(qwen3, draft(noisy), speculative_tokens=3)
    run(
        guessing,
        [spec(str(n), text, sampling=replace(RANDOM, seed=n)) for n, text in enumerate(prompts(8, seed=1))],
    )
    counts = guessing.stats().cache
    assert 0.5 < counts.accepted / counts.drafted < 1


def test_guesses_behind_an_end_do_not_stand(qwen3: DecoderLM) -> None:
    plain = ids(run(engine(qwen3), [spec("a", [3, 1, 4, 1, 5])])["a"])
    place = next(n for n in range(5, 20) if plain[n] not in plain[:n])
    ends = spec("a", [3, 1, 4, 1, 5], stop_token_ids=frozenset({plain[place]}))

    outputs = run(engine(qwen3, draft(qwen3), speculative_tokens=8), [ends])["a"]

    assert ids(outputs) == plain[: place + 1]
    assert outputs[-1].finish == "stop"


def test_an_answer_is_never_longer_than_it_may_be(qwen3: DecoderLM) -> None:
    for max_tokens in (1, 2, 3, 6):
        outputs = run(
            engine(qwen3, draft(qwen3), speculative_tokens=8), [spec("a", [3, 1, 4], max_tokens=max_tokens)]
        )
        assert len(outputs["a"]) == max_tokens
        assert outputs["a"][-1].finish == "length"


@pytest.mark.slow
def test_what_did_not_stand_is_not_kept_for_others(qwen3: DecoderLM, noisy: DecoderLM) -> None:
    """The prefix cache holds tokens that were taken, and no draft."""
    guessing = engine(qwen3, draft(noisy), speculative_tokens=8)
    text = list(range(40, 60))
    answer = ids(run(guessing, [spec("a", text, max_tokens=30)])["a"])
    assert guessing.stats().cache.accepted < guessing.stats().cache.drafted
    turn = spec("b", [*text, *answer, 5])

    assert ids(run(guessing, [turn])["b"]) == ids(run(engine(qwen3), [turn])["b"])
    assert guessing.stats().cache.hits == 48


@pytest.mark.slow
def test_a_cancelled_sequence_leaves_nothing_with_who_guesses(qwen3: DecoderLM) -> None:
    proposer = draft(qwen3, num_blocks=20)
    guessing = engine(qwen3, proposer, num_blocks=20)
    for number in range(12):
        guessing.add(spec(str(number), [number] * 20))
        guessing.step()
        guessing.step()
        guessing.cancel(str(number))
    assert proposer._blocks.free == 20


def test_rejected_drafts_count_as_computed(qwen3: DecoderLM, noisy: DecoderLM) -> None:
    asked = spec("a", prompts(1, seed=3)[0], ignore_eos=True)
    guessing = engine(qwen3, draft(noisy))
    run(guessing, [asked])
    counts, work = guessing.stats().cache, guessing.stats().work

    rejected = counts.drafted - counts.accepted
    assert rejected > 0
    assert work.computed_tokens == len(asked.prompt_ids) + asked.max_tokens - 1 + rejected
