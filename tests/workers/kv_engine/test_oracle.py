"""Greedy tokens are those of transformers' `generate`, for any arrival and any other sequences."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from models.decoder_lm.nodes import DecoderLM, load
from models.transformers_lm.attention_forms import AttentionForm, Latents
from tests.tiny import FAMILIES, MODELS, Family, tiny_checkpoint
from tests.workers.kv_engine.engines import make_engine
from tests.workers.kv_engine.oracle import clear_text, generate, ids, prompts, run, tokens
from workers.kv_engine import engine as kv_engine
from workers.kv_engine.attention import paged
from workers.kv_engine.attention.span_groups import Group
from workers.kv_engine.engine import KVEngine
from workers.kv_engine.sequence_spec import SequenceSpec
from workers.kv_engine.step import Step

NEW_TOKENS = 16
MANY_TOKENS = 64
WINDOWED = [family for family in FAMILIES if set(MODELS[family].windows) != {None}]


def specs(texts: list[list[int]], max_tokens: int = NEW_TOKENS) -> list[SequenceSpec]:
    return [SequenceSpec(key=str(i), prompt_ids=text, max_tokens=max_tokens) for i, text in enumerate(texts)]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_staggered_mixed_requests_answer_as_generate_does(family: Family) -> None:
    """Nine tokens a step: prompts of up to 70 tokens are cut many times, next to decodes of others.

    Every text outgrows the sliding windows of 24: some in the prompt, some while they are answered.
    """
    texts, expected = clear_texts(family, 6, 15, 38, 66)
    engine = make_engine(
        load(tiny_checkpoint(family)), num_blocks=64, block_size=8, max_step_tokens=9, max_sequences=4
    )

    found = run(engine, specs(texts, MANY_TOKENS), every=3)

    assert [ids(found[str(i)]) for i in range(4)] == expected
    assert len({token for answer in expected for token in answer}) > 60
    assert all(len(set(answer)) > 8 for answer in expected)


def clear_texts(family: Family, *lengths: int) -> tuple[list[list[int]], list[list[int]]]:
    """Return prompts of these lengths, and the answers of `generate`."""
    texts, answers = zip(*(clear_text(family, length, MANY_TOKENS) for length in lengths), strict=True)
    return list(texts), list(answers)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_longest_texts_are_exact(family: Family) -> None:
    """Llama's scaled RoPE differs from the plain one only at large positions; so does YaRN."""
    length = MODELS[family].max_positions - NEW_TOKENS
    text, expected = clear_text(family, length, NEW_TOKENS)
    engine = make_engine(
        load(tiny_checkpoint(family)), num_blocks=64, block_size=8, max_step_tokens=100, max_sequences=1
    )

    assert ids(run(engine, specs([text]))["0"]) == expected


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_resumed_answer_continues_as_if_nothing_had_happened(family: Family) -> None:
    """The released tokens are computed again in pieces of seven, and exceed every window."""
    text, expected = clear_text(family, 15, MANY_TOKENS)
    engine = make_engine(
        load(tiny_checkpoint(family)), num_blocks=20, block_size=8, max_step_tokens=7, max_sequences=1
    )
    [spec] = specs([text], MANY_TOKENS)

    found = run(engine, [replace(spec, prefix_ids=expected[:40])])

    assert ids(found["0"]) == expected[40:]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_has_the_window_of_the_checkpoint(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(
        load(tiny_checkpoint(family)), num_blocks=10, block_size=8, max_step_tokens=80, max_sequences=1
    )
    asked = record_windows(monkeypatch)

    run(engine, specs([list(range(60))], 1))

    model = MODELS[family]
    attending = [
        window for window, cells in zip(model.windows, model.kv_layout.shapes, strict=True) if cells.heads
    ]
    assert [window if window and window < 60 else None for window in asked] == attending


def record_windows(monkeypatch: pytest.MonkeyPatch, wider_by: int = 0) -> list[int | None]:
    """Record the windows of the layers, and optionally widen them."""
    asked: list[int | None] = []
    groups = paged._Context.groups

    def recorded(self: paged._Context, window: int | None, chunk: int | None = None) -> Sequence[Group]:
        asked.append(window)
        return groups(self, window and window + wider_by, chunk)

    monkeypatch.setattr(paged._Context, "groups", recorded)
    return asked


@pytest.mark.slow
@pytest.mark.parametrize("family", WINDOWED)
def test_a_window_one_token_too_wide_is_detected(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control; the twelve tokens of the self-check are too few to detect it."""
    record_windows(monkeypatch, wider_by=1)
    texts, expected = clear_texts(family, 15, 38, 66)
    engine = make_engine(
        load(tiny_checkpoint(family)), num_blocks=64, block_size=8, max_step_tokens=50, max_sequences=4
    )

    found = run(engine, specs(texts, MANY_TOKENS))

    assert all(ids(found[str(i)]) != expected[i] for i in range(3))


# ---- other forms of attention -----------------------------------------------------------------------


def found_and_expected(family: Family) -> tuple[list[list[int]], list[list[int]]]:
    """Answers to three texts at once, and those of `generate`."""
    texts, expected = clear_texts(family, 15, 38, 66)
    engine = make_engine(
        load(tiny_checkpoint(family)), num_blocks=64, block_size=8, max_step_tokens=50, max_sequences=4
    )
    found = run(engine, specs(texts, MANY_TOKENS))
    return [ids(found[str(i)]) for i in range(3)], expected


def differ(family: Family) -> bool:
    """Return whether the answers differ from those of `generate`."""
    found, expected = found_and_expected(family)
    return found != expected


@pytest.mark.slow
@pytest.mark.parametrize("wider_by", [1, -1])
def test_a_chunk_of_another_length_is_detected(wider_by: int, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = paged._Context.groups

    def other(self: paged._Context, window: int | None, chunk: int | None = None) -> Sequence[Group]:
        return groups(self, window, chunk and chunk + wider_by)

    monkeypatch.setattr(paged._Context, "groups", other)
    assert differ("llama4")


@pytest.mark.slow
@pytest.mark.parametrize("change", [lambda _: None, lambda positions: positions + 16])
def test_queries_without_their_growth_are_detected(change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    queries = AttentionForm.queries

    def other(self: AttentionForm, given: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        changed = change(positions)
        return given if changed is None else queries(self, given, changed)

    monkeypatch.setattr(kv_engine, "check_node", lambda *_: None)
    monkeypatch.setattr(AttentionForm, "queries", other)
    assert differ("llama4")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt_oss", "granite_swa", "mimo"])
@pytest.mark.parametrize("change", [lambda sinks: None, lambda sinks: sinks.flip(0)])
def test_missing_and_exchanged_sinks_are_detected(
    family: Family, change: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    weighted = paged._weighted

    def other(*args: Any) -> torch.Tensor:
        *given, scores, heads = args
        sinks = None if scores.sinks is None else change(scores.sinks)
        return weighted(*given, replace(scores, sinks=sinks), heads)  # type: ignore[call-arg]

    monkeypatch.setattr(kv_engine, "check_node", lambda *_: None)
    monkeypatch.setattr(paged, "_weighted", other)
    assert differ(family)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
@pytest.mark.parametrize("method", ["queries", "outputs"])
def test_matrices_of_other_heads_are_detected(
    family: Family, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own: Any = getattr(Latents, method)
    monkeypatch.setattr(kv_engine, "check_node", lambda *_: None)
    monkeypatch.setattr(Latents, method, lambda self, given: own(self, given.flip(1)).flip(1))
    assert differ(family)


def test_latent_layers_store_one_row_per_token() -> None:
    """Of DeepSeek V3 itself: 576 numbers a layer, where keys and values of 128 heads would be 40,960."""
    engine = make_engine(
        load(tiny_checkpoint("deepseek_v3")), num_blocks=10, block_size=8, max_step_tokens=80, max_sequences=1
    )

    assert [cells.shape[1:].numel() for cells in engine._pool.stored] == [32, 32]


# ---- negative controls ------------------------------------------------------------------------------


def answers(engine: KVEngine, count: int) -> list[list[int]]:
    """Run an engine with its sequences, and return the tokens."""
    found: list[list[int]] = [[] for _ in range(count)]
    while engine.has_work:
        for output in tokens(engine.step()):
            found[int(output.key)].append(output.token_id)
    return found


@pytest.mark.slow
def test_wrong_positions_are_detected(qwen3: DecoderLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: positions that restart every seven tokens."""
    texts = prompts(4, seed=1, shortest=10)
    engine = make_engine(qwen3, num_blocks=64, block_size=8, max_step_tokens=9, max_sequences=8)
    for spec in specs(texts):
        engine.add(spec)
    forward = DecoderLM.forward

    def wrong(self: DecoderLM, inputs: torch.Tensor, step: Step) -> torch.Tensor:
        return forward(self, inputs, replace(step, positions=step.positions % 7))

    monkeypatch.setattr(DecoderLM, "forward", wrong)

    found = answers(engine, 4)

    assert all(found[i] != generate("qwen3", text, NEW_TOKENS) for i, text in enumerate(texts))


@pytest.mark.parametrize("swapped", [False, True])
def test_a_wrong_history_is_detected(qwen3: DecoderLM, swapped: bool) -> None:
    """Negative control: the first blocks of two sequences are swapped while they run."""
    texts = prompts(2, seed=1, shortest=20, longest=20)
    engine = make_engine(qwen3, num_blocks=64, block_size=8, max_step_tokens=40, max_sequences=2)
    for spec in specs(texts):
        engine.add(spec)
    first_tokens = ids(engine.step())
    if swapped:
        for cells in (*engine._pool.keys, *engine._pool.values):
            blocks = cells[: 64 * 8].view(64, 8, *cells.shape[1:])
            places = [sequence.blocks[0] for sequence in engine._scheduler.running]
            blocks[places] = blocks[places[::-1]]

    found = answers(engine, 2)

    for index, text in enumerate(texts):
        is_equal = [first_tokens[index], *found[index]] == generate("qwen3", text, NEW_TOKENS)
        assert is_equal is not swapped
