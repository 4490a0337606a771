"""Replayed steps give the same results as unrecorded steps."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from models.decoder_lm.nodes import DecoderLM
from tests.workers.kv_engine.engines import make_engine
from tests.workers.kv_engine.oracle import ids, prompts, run_all, scores
from tests.workers.kv_engine.recorder import Again
from tests.workers.kv_engine.sampling.test_grammar_masks import compiled, processing_of
from workers.kv_engine.engine import KVEngine
from workers.kv_engine.gpu.cuda_graphs import GraphCapture, Replay, buckets
from workers.kv_engine.outputs import Output
from workers.kv_engine.sequence_spec import Sampling, SequenceSpec
from workers.kv_engine.speculative.proposer import PromptLookup

SAMPLINGS = (
    Sampling(),
    Sampling(temperature=1.2, seed=3),
    Sampling(temperature=1.2, top_k=20, seed=4),
    Sampling(temperature=1.0, top_p=0.8, seed=5),
    Sampling(temperature=1.5, top_k=40, top_p=0.9, min_p=0.02, seed=6),
    Sampling(temperature=0.9, min_p=0.1, seed=7),
)


def engine(node: DecoderLM, capture: GraphCapture | None = None, **changes: Any) -> KVEngine:
    sizes: dict[str, Any] = {"num_blocks": 64, "block_size": 8, "max_step_tokens": 24, "max_sequences": 6}
    return make_engine(node, **(sizes | changes), capture=capture)


def specs(count: int, **changes: Any) -> list[SequenceSpec]:
    return [
        SequenceSpec(
            key=str(n),
            prompt_ids=text,
            max_tokens=6 + n % 9,
            sampling=SAMPLINGS[n % len(SAMPLINGS)],
            **changes,
        )
        for n, text in enumerate(prompts(count, seed=5, longest=30))
    ]


def answers(outputs: dict[str, list[Output]]) -> dict[str, list[int]]:
    return {key: ids(as_dalsegno_error) for key, as_dalsegno_error in outputs.items()}


@pytest.mark.slow
@pytest.mark.parametrize("every", [0, 1, 3])
def test_tokens_are_the_same_whoever_arrives_when(qwen3: DecoderLM, every: int) -> None:
    again = Again()
    recorded = engine(qwen3, again)

    found = answers(run_all(recorded, specs(18), every=every))

    assert found == answers(run_all(engine(qwen3), specs(18), every=every))
    replayed_steps = again.replays // 2  # each by its body and its sampler
    assert 10 < replayed_steps < recorded.forwards


@pytest.mark.slow
def test_penalties_biases_and_scores_reach_the_logits_of_a_replayed_step(qwen3: DecoderLM) -> None:
    again = Again()
    wishes = [
        replace(
            one,
            sampling=replace(one.sampling, repetition_penalty=1.3, logit_bias=((7, 4.0), (9, -3.0)))
            if n % 2
            else one.sampling,
            logprobs=2 if n % 3 == 0 else None,
        )
        for n, one in enumerate(specs(9))
    ]

    found, expected = run_all(engine(qwen3, again), wishes), run_all(engine(qwen3), wishes)

    assert answers(found) == answers(expected)
    assert again.replays > 20
    for key, outputs in expected.items():
        told, meant = scores(found[key]), scores(outputs)
        assert [one.logprob for one in told] == pytest.approx([one.logprob for one in meant], abs=1e-4)
        assert [[token for token, _ in one.top] for one in told] == [
            [token for token, _ in one.top] for one in meant
        ]


@pytest.mark.slow
def test_a_guide_masks_the_logits_of_a_replayed_step(qwen3: DecoderLM) -> None:
    again = Again()
    ends = frozenset(processing_of().eos_ids)
    guided = [
        replace(one, guide=compiled(regex="[a-f]{5,9}"), eos_ids=ends) if int(one.key) % 2 else one
        for one in specs(8)
    ]

    found = answers(run_all(engine(qwen3, again), guided))

    assert found == answers(run_all(engine(qwen3), guided))
    assert again.replays > 10


@pytest.mark.slow
def test_steps_with_prompts_guesses_or_scored_prompts_run_as_they_come(qwen3: DecoderLM) -> None:
    def replays(one: SequenceSpec, **changes: Any) -> int:
        again = Again()
        run_all(engine(qwen3, again, **changes), [one])
        return again.replays

    plain = SequenceSpec(key="a", prompt_ids=[1, 2, 3, 1, 2, 3], max_tokens=1)
    assert replays(plain) == 0
    assert replays(replace(plain, max_tokens=4)) == 2 * 3
    assert replays(replace(plain, max_tokens=0, scores_prompt=True, logprobs=1)) == 0
    forward_alone = engine(qwen3, proposer=PromptLookup())
    run_all(forward_alone, [replace(plain, max_tokens=9)])
    assert replays(replace(plain, max_tokens=9), proposer=PromptLookup()) < 2 * forward_alone.forwards


def test_buckets_leave_little_to_pad() -> None:
    assert buckets(256) == [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256]
    assert buckets(1) == [1]
    assert buckets(6) == [1, 2, 4, 6]
    assert buckets(100) == [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 100]


class Refusing:
    """Records none but small steps."""

    def __init__(self, error: Callable[[str], Exception], largest: int) -> None:
        self.asked: list[int] = []
        self._error = error
        self._largest = largest
        self._again = Again()

    def capture(self, compute: Callable[[], None]) -> Replay:
        rows: int = compute.args[0]  # type: ignore[attr-defined] # a partial
        self.asked.append(rows)
        if rows > self._largest:
            raise self._error("operation not permitted when stream is capturing\nmore about it")
        return self._again.capture(compute)


def test_a_model_that_cannot_be_recorded_runs_as_it_comes_and_the_log_says_why(
    qwen3: DecoderLM, caplog: pytest.LogCaptureFixture
) -> None:
    refusing = Refusing(RuntimeError, largest=0)
    with caplog.at_level(logging.INFO):
        found = answers(run_all(engine(qwen3, refusing), specs(4)))

    assert found == answers(run_all(engine(qwen3), specs(4)))
    assert refusing.asked == [6]
    assert (
        "Qwen3ForCausalLM cannot be recorded (operation not permitted when stream is capturing)"
        in caplog.text
    )
    assert "recorded steps of no rows" in caplog.text


@pytest.mark.slow
def test_steps_that_find_no_memory_run_as_they_come_and_smaller_ones_are_recorded(
    qwen3: DecoderLM, caplog: pytest.LogCaptureFixture
) -> None:
    refusing = Refusing(torch.OutOfMemoryError, largest=2)
    with caplog.at_level(logging.INFO):
        found = answers(run_all(engine(qwen3, refusing), specs(9)))

    assert found == answers(run_all(engine(qwen3), specs(9)))
    assert "too little memory to record steps of 6 rows" in caplog.text
    assert "too little memory to record steps of 4 rows" in caplog.text
    assert "recorded steps of 1, 2 rows" in caplog.text
