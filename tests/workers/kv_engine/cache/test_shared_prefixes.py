"""Cached prefixes are used again, sequences are preempted, and no answer changes by it."""

from dataclasses import replace
from typing import Any

import pytest

from models.decoder_lm.nodes import DecoderLM
from tests.workers.kv_engine.engines import make_engine
from tests.workers.kv_engine.oracle import ids, prompts, run, run_all, scores
from workers.kv_engine.engine import KVEngine
from workers.kv_engine.sequence_spec import Sampling, SequenceSpec

SAMPLED = Sampling(
    temperature=1.1, top_k=40, seed=3, repetition_penalty=1.2, presence_penalty=0.4, min_tokens=4
)
COMMON = list(range(20, 60))


def engine(node: DecoderLM, **changes: Any) -> KVEngine:
    sizes: dict[str, Any] = {"num_blocks": 64, "block_size": 8, "max_step_tokens": 24, "max_sequences": 8}
    return make_engine(node, **(sizes | changes))


def plain(node: DecoderLM) -> KVEngine:
    """Return an engine without a cache, with room for all sequences."""
    return engine(node, num_blocks=400, max_step_tokens=500, prefix_cache=False, decode_slowdown_limit=None)


def spec(key: str, prompt: list[int], **changes: Any) -> SequenceSpec:
    values: dict[str, Any] = {"key": key, "prompt_ids": prompt, "max_tokens": 12}
    return SequenceSpec(**(values | changes))


def family(count: int, **changes: Any) -> list[SequenceSpec]:
    """Return sequences with a common prefix and different ends, greedy and sampled ones."""
    return [
        spec(
            str(number),
            [*COMMON, *text],
            sampling=replace(SAMPLED, seed=number) if number % 2 else Sampling(),
            **changes,
        )
        for number, text in enumerate(prompts(count, seed=9))
    ]


def alone(node: DecoderLM, requests: list[SequenceSpec]) -> dict[str, list[int]]:
    return {one.key: ids(run(plain(node), [one])[one.key]) for one in requests}


@pytest.mark.slow
def test_32_sequences_compute_their_prefix_once_and_answer_as_each_alone(qwen3: DecoderLM) -> None:
    requests = family(32)
    sharing = engine(qwen3, num_blocks=500, max_sequences=32, max_step_tokens=64)

    together = run(sharing, requests)

    assert {key: ids(outputs) for key, outputs in together.items()} == alone(qwen3, requests)
    stats = sharing.stats()
    by_hand = 31 * len(COMMON)  # five full blocks of eight, for all but the first
    assert stats.cache.hits >= by_hand
    prompt_tokens = sum(len(one.prompt_ids) for one in requests)
    generated = sum(len(outputs) for outputs in together.values())
    assert stats.work.computed_tokens == prompt_tokens + generated - 32 - stats.cache.hits


def test_a_second_run_finds_the_whole_prompt(qwen3: DecoderLM) -> None:
    one = engine(qwen3)
    first = ids(run(one, [spec("a", COMMON)])["a"])
    forwards = one.forwards

    assert ids(run(one, [spec("b", COMMON)])["b"]) == first
    assert one.stats().cache.hits == 32  # of 40: the last block is computed again, for a token to sample
    assert one.forwards - forwards == 12


@pytest.mark.slow
@pytest.mark.parametrize("num_blocks", [15, 18])
def test_in_a_small_pool_sequences_are_preempted_and_all_answer_as_alone(
    qwen3: DecoderLM, num_blocks: int
) -> None:
    requests = family(8, max_tokens=30, logprobs=2)
    crowded = engine(qwen3, num_blocks=num_blocks)

    together = run(crowded, requests)

    assert {key: ids(outputs) for key, outputs in together.items()} == alone(qwen3, requests)
    assert crowded.stats().cache.preemptions > 0
    assert crowded.stats().kv_used == 0


@pytest.mark.slow
def test_a_preempted_sequence_is_scored_as_if_it_had_not_been(qwen3: DecoderLM) -> None:
    requests = family(6, max_tokens=24, logprobs=1, scores_prompt=True)
    crowded = engine(qwen3, num_blocks=16)
    together = run_all(crowded, requests)
    assert crowded.stats().cache.preemptions > 0

    for one in requests:
        found, expected = scores(together[one.key]), scores(run_all(plain(qwen3), [one])[one.key])
        assert [score.token_id for score in found] == [score.token_id for score in expected]
        assert [score.logprob for score in found] == pytest.approx(
            [score.logprob for score in expected], abs=1e-4
        )


def test_an_answer_is_found_by_the_next_turn_of_its_conversation(qwen3: DecoderLM) -> None:
    one = engine(qwen3)
    answer = ids(run(one, [spec("a", COMMON, max_tokens=17)])["a"])
    turn = spec("b", [*COMMON, *answer, 7, 8, 9])
    hit = one.stats().cache.hits

    assert ids(run(one, [turn])["b"]) == alone(qwen3, [turn])["b"]
    assert one.stats().cache.hits - hit == 56


def test_sequences_of_another_cache_root_are_not_found(qwen3: DecoderLM) -> None:
    one = engine(qwen3)
    run(one, [spec("a", COMMON, cache_root="mine")])
    run(one, [spec("b", COMMON, cache_root="theirs")])

    assert one.stats().cache.hits == 0
