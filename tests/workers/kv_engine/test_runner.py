"""Forwards are launched first and read later; errors are raised by the read."""

from typing import Any

import pytest
import torch

from models.decoder_lm.nodes import DecoderLM
from tests.workers.kv_engine.oracle import prompts
from tests.workers.kv_engine.recorder import Again
from workers.kv_engine.attention.paged import ATTENTION
from workers.kv_engine.attention.pool import PagedPool
from workers.kv_engine.runner import Runner
from workers.kv_engine.sequence import Sequence, Span
from workers.kv_engine.sequence_spec import Sampling, SequenceSpec
from workers.kv_engine.step import StepBuilder

TEXTS = prompts(2, seed=9, shortest=5, longest=9)


def runner(node: DecoderLM) -> Runner:
    node.use_attention(ATTENTION)
    sizes: dict[str, Any] = {"max_sequences": 2, "max_step_tokens": 32}
    builder = StepBuilder(**sizes, max_blocks=4, block_size=8, device=node.device, padding_block=8)
    pool = PagedPool.of(node, slots=8 * 8 + 1)
    return Runner(node, pool, builder, **sizes, followers=None, capture=Again(), laps=None)


def prefilled(of: Runner) -> list[Sequence]:
    """Return two sequences with a first token each."""
    sequences = []
    for row, text in enumerate(TEXTS):
        wish = Sampling(temperature=1.0, seed=row) if row else Sampling()
        one = Sequence(SequenceSpec(key=str(row), prompt_ids=text, max_tokens=9, sampling=wish))
        one.row, one.blocks = row, list(range(4 * row, 4 * row + 4))
        sequences.append(one)
    spans = [Span(one, 0, len(one.ids)) for one in sequences]
    take(sequences, of.launch(spans).read().tokens)
    return sequences


def last(sequences: list[Sequence]) -> list[Span]:
    return [Span(one, len(one.ids) - 1, 1) for one in sequences]


def spans_after(sequences: list[Sequence]) -> list[Span]:
    return [Span(one, len(one.ids), 1) for one in sequences]


def take(sequences: list[Sequence], found: list[int]) -> list[int]:
    for one, token in zip(sequences, found, strict=True):
        one.ids.append(token)
    return found


def test_a_step_launched_after_an_unread_one_has_the_same_result(qwen3: DecoderLM) -> None:
    """The first of two sequences is in two steps, the second in a third one, too."""
    one = runner(qwen3)
    sequences = prefilled(one)
    texts = [list(sequence.ids) for sequence in sequences]

    first = one.launch(last(sequences))
    second = one.launch_after(first, spans_after(sequences))
    assert [sequence.ids for sequence in sequences] == texts
    found = [take(sequences, first.read().tokens)]
    third = one.launch_after(second, spans_after(sequences[1:]))
    found += [take(sequences, second.read().tokens), third.read().tokens]

    assert [step.number for step in (first, second, third)] == [2, 3, 4]
    assert one.forwards == 4
    expected = read_first(qwen3, 3)
    assert found == [*expected[:2], expected[2][1:]]
    assert len({token for tokens in expected for token in tokens}) > 4


def read_first(node: DecoderLM, steps: int) -> list[list[int]]:
    one = runner(node)
    sequences, found = prefilled(one), list[list[int]]()
    for _ in range(steps):
        found.append(take(sequences, one.launch(last(sequences)).read().tokens))
    return found


def test_the_tokens_of_the_remaining_spans_are_selected(qwen3: DecoderLM) -> None:
    one = runner(qwen3)
    step = one.launch(last(prefilled(one)))
    ran = step.read()

    assert step.part_of(ran, step.spans) is ran
    assert step.part_of(ran, step.spans[1:]).tokens == ran.tokens[1:]


def test_only_replayed_steps_keep_their_tokens_on_the_device(qwen3: DecoderLM) -> None:
    one = runner(qwen3)
    [sequence, _] = prefilled(one)

    assert one.launch([Span(sequence, 0, len(sequence.ids))]).tokens is None
    assert one.launch(last([sequence])).tokens is not None


def test_an_error_of_a_launch_ahead_is_raised_by_its_read(
    qwen3: DecoderLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = runner(qwen3)
    sequences = prefilled(one)
    texts = [list(sequence.ids) for sequence in sequences]
    first = one.launch(last(sequences))

    def fail(_: DecoderLM, token_ids: torch.Tensor) -> torch.Tensor:
        raise RuntimeError(f"no luck with {len(token_ids)}")

    with monkeypatch.context() as patched:
        patched.setattr(DecoderLM, "embed", fail)
        with pytest.raises(RuntimeError, match="no luck with 2"):
            one.launch(last(sequences))
        second = one.launch_after(first, spans_after(sequences))

    assert second.tokens is None
    assert len(first.read().tokens) == 2
    assert [sequence.ids for sequence in sequences] == texts
    with pytest.raises(RuntimeError, match="no luck with 2"):
        second.read()
