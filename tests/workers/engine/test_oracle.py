"""Greedy tokens are those of transformers' `generate`, however requests come and whoever is beside them."""

from dataclasses import replace

import pytest
import torch

from shared.models.decoder_lm.nodes import DecoderLM, load
from tests.tiny import FAMILIES, Family, tiny_checkpoint
from tests.workers.engine.oracle import generate, ids, prompts, run, tokens
from workers.engine.kv_engine import KVEngine
from workers.engine.sequence import SequenceSpec
from workers.engine.step import Step

NEW_TOKENS = 16


def specs(texts: list[list[int]], max_tokens: int = NEW_TOKENS) -> list[SequenceSpec]:
    return [SequenceSpec(key=str(i), prompt_ids=text, max_tokens=max_tokens) for i, text in enumerate(texts)]


@pytest.mark.parametrize("family", FAMILIES)
def test_staggered_mixed_requests_answer_as_generate_does(family: Family) -> None:
    """Nine tokens a step: prompts of up to forty are cut many times, always beside others' decodes."""
    texts = prompts(8, seed=1)
    expected = [generate(family, text, NEW_TOKENS) for text in texts]
    engine = KVEngine(
        load(tiny_checkpoint(family)), num_blocks=64, block_size=8, max_step_tokens=9, max_rows=8
    )

    found = run(engine, specs(texts), every=3)

    assert [ids(found[str(i)]) for i in range(8)] == expected
    assert len({token for answer in expected for token in answer}) > 60
    assert all(len(set(answer)) > 8 for answer in expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_context_far_longer_than_rope_was_trained_for_is_exact(family: Family) -> None:
    """Llama's scaled rope differs from the plain one only far from the start."""
    text = prompts(1, seed=5, shortest=400, longest=400)[0]
    engine = KVEngine(
        load(tiny_checkpoint(family)), num_blocks=60, block_size=8, max_step_tokens=100, max_rows=1
    )

    assert ids(run(engine, specs([text]))["0"]) == generate(family, text, NEW_TOKENS)


def answers(engine: KVEngine, count: int) -> list[list[int]]:
    """What an engine that was given its sequences before comes to."""
    found: list[list[int]] = [[] for _ in range(count)]
    while engine.has_work:
        for output in tokens(engine.step()):
            found[int(output.key)].append(output.token_id)
    return found


def test_wrong_positions_do_not_pass(qwen3: DecoderLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: positions that begin anew every seven tokens."""
    texts = prompts(4, seed=1, shortest=10)
    engine = KVEngine(qwen3, num_blocks=64, block_size=8, max_step_tokens=9, max_rows=8)
    for spec in specs(texts):
        engine.add(spec)
    forward = DecoderLM.forward

    def wrong(self: DecoderLM, inputs: torch.Tensor, step: Step) -> torch.Tensor:
        return forward(self, inputs, replace(step, positions=step.positions % 7))

    monkeypatch.setattr(DecoderLM, "forward", wrong)

    found = answers(engine, 4)

    assert all(found[i] != generate("qwen3", text, NEW_TOKENS) for i, text in enumerate(texts))


@pytest.mark.parametrize("swapped", [False, True])
def test_a_wrong_history_does_not_pass(qwen3: DecoderLM, swapped: bool) -> None:
    """Negative control: two sequences' first blocks change places under their feet."""
    texts = prompts(2, seed=1, shortest=20, longest=20)
    engine = KVEngine(qwen3, num_blocks=64, block_size=8, max_step_tokens=40, max_rows=2)
    for spec in specs(texts):
        engine.add(spec)
    first_tokens = ids(engine.step())
    if swapped:
        for cells in (*engine._pool.keys, *engine._pool.values):
            blocks = cells.view(64, 8, *cells.shape[1:])
            places = [sequence.blocks[0] for sequence in engine._scheduler.running]
            blocks[places] = blocks[places[::-1]]

    found = answers(engine, 2)

    for index, text in enumerate(texts):
        is_equal = [first_tokens[index], *found[index]] == generate("qwen3", text, NEW_TOKENS)
        assert is_equal is not swapped
