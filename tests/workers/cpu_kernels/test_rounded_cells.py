"""Keys and values of eight bits: what is kept of a token, and the answers from it."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import AttentionInterface

from tests.workers.cpu_kernels import models
from tests.workers.cpu_kernels.libraries import NAMES, library
from tests.workers.cpu_kernels.test_decoder import NEW_TOKENS, engine, prompts
from tests.workers.kv_engine.oracle import ids, run
from tests.workers.kv_engine.test_kv_transfer import EXPORT, Slots
from workers.cpu_kernels.decoder import NativeDecoder, use_cpu_kernels
from workers.kv_engine.attention import paged
from workers.kv_engine.attention.paged import attention_context
from workers.kv_engine.attention.pool import PagedPool
from workers.kv_engine.quantisation.wanted import Quantisation
from workers.kv_engine.sequence import Sequence, Span
from workers.kv_engine.sequence_spec import SequenceSpec
from workers.kv_engine.step import StepBuilder
from workers.kv_engine.text_logits import predictions


def rounding(name: str = "qwen3", *, variant: str = NAMES[-1], threads: int = 1, **how: Any) -> NativeDecoder:
    wanted = Quantisation(rounds_cells=True)
    return NativeDecoder(models.node(name, **how), library(variant), threads=threads, quantisation=wanted)


def rounded(heads: torch.Tensor) -> torch.Tensor:
    """Keys or values, (..., dim), as a plain dequantisation of eight bits has them."""
    scale = heads.abs().amax(-1, keepdim=True) / 127
    return (heads / scale).round() * scale


def test_a_head_keeps_its_numbers_in_127_steps_of_the_largest() -> None:
    [text] = prompts(5)
    sequence = Sequence(SequenceSpec(key="a", prompt_ids=text, max_tokens=1))
    sequence.blocks, sequence.row = [2], 0
    builder = StepBuilder(
        max_sequences=1, max_step_tokens=8, max_blocks=1, block_size=8, device=torch.device("cpu")
    )
    step = builder.build([Span(sequence, 0, 5)])
    plain = NativeDecoder(models.node(), library(NAMES[-1]), threads=1)
    of_bytes = rounding()
    pools = [PagedPool.of(node, slots=32) for node in (plain, of_bytes)]

    for node, pool in zip((plain, of_bytes), pools, strict=True):
        with torch.inference_mode(), attention_context(pool, step):
            node.forward(node.embed(step.token_ids), step)

    assert pools[1].keys[0].shape == (32, 2, 36)
    assert pools[1].keys[0].dtype == torch.int8
    for exact, kept in ((pools[0].keys[0], pools[1].keys[0]), (pools[0].values[0], pools[1].values[0])):
        cells = kept[16:21]
        scales = cells[..., 32:].contiguous().view(torch.float32)
        assert torch.equal(scales, exact[16:21].abs().amax(-1, keepdim=True) / 127)
        assert torch.allclose(cells[..., :32] * scales, rounded(exact[16:21]), atol=1e-6)
        assert len(torch.unique(cells[..., :32])) > 100
        assert not kept[:16].any()


@contextmanager
def rounding_attention() -> Iterator[None]:
    """Within this context torch attends to rounded keys and values."""

    def attention(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **named: Any
    ) -> Any:
        return paged.paged_attention(module, query, rounded(key), rounded(value), *rest, **named)

    AttentionInterface.register(paged.ATTENTION, attention)
    try:
        yield
    finally:
        AttentionInterface.register(paged.ATTENTION, paged.paged_attention)


@pytest.mark.slow
@pytest.mark.parametrize("variant", NAMES)
@pytest.mark.parametrize("name", models.MODELS)
def test_predictions_are_those_of_transformers_layers_with_rounded_keys_and_values(
    name: str, variant: str
) -> None:
    [text] = prompts(200)
    stock = models.node(name)
    stock.use_attention(paged.ATTENTION)
    floats = predictions(stock, text)
    with rounding_attention():
        expected = predictions(stock, text)

    found = predictions(rounding(name, variant=variant, threads=2), text)

    error, effect = (float((one.log_probs - expected.log_probs).abs().median()) for one in (found, floats))
    assert error < 0.1 * effect
    assert found.agreement(expected) > 0.99


@pytest.mark.slow
@pytest.mark.parametrize("variant", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_probabilities_are_the_same_bits_alone_and_among_others(dtype: torch.dtype, variant: str) -> None:
    specs = [
        SequenceSpec(key=str(number), prompt_ids=text, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=5)
        for number, text in enumerate(prompts(150, 20, 33, 7))
    ]
    three, one = (rounding(dtype=dtype, variant=variant, threads=threads) for threads in (3, 1))
    alone = engine(one, max_step_tokens=11, max_sequences=1)

    together = run(engine(three), specs, every=2)

    for spec in specs:
        [(key, found)] = run(alone, [spec]).items()
        assert [output.score for output in found] == [output.score for output in together[key]]


def test_a_sequence_continues_in_another_engine() -> None:
    [text] = prompts(41)
    whole = SequenceSpec(key="a", prompt_ids=text, max_tokens=12, ignore_eos=True)
    expected = ids(run(engine(rounding()), [whole])["a"])
    slots = Slots()
    exporting = engine(rounding(), export_to=slots.allocate)

    [first] = run(
        exporting, [SequenceSpec(key="a", prompt_ids=text, max_tokens=1, ignore_eos=True, export=EXPORT)]
    )["a"]

    array = slots.read()
    assert (array.dtype, array.shape) == ("int8", (3, 2, 41, 2, 36))
    continuing = engine(rounding(), block_size=16)
    continued = SequenceSpec(
        key="a", prompt_ids=text, prefix_ids=[first.token_id], max_tokens=12, ignore_eos=True, kv=array
    )
    assert ids(run(continuing, [continued])["a"]) == expected[1:]


def test_the_error_is_told_at_load(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.cpu_kernels.library.load", lambda: library(NAMES[-1]))
    [text] = prompts(40)

    with caplog.at_level(logging.INFO):
        found = use_cpu_kernels(
            models.node(), threads=1, quantisation=Quantisation(rounds_cells=True, measured=text)
        )

    assert isinstance(found, NativeDecoder)
    assert found.kv_dtype == torch.int8
    assert "llm: keys and values of int8: perplexity" in caplog.text
    assert "llm: weights" not in caplog.text.replace("llm: weights packed", "")


def test_weights_and_cells_are_measured_one_after_the_other(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.cpu_kernels.library.load", lambda: library(NAMES[-1]))
    [text] = prompts(40)
    wanted = Quantisation(bits=8, rounds_cells=True, measured=text)

    with caplog.at_level(logging.INFO):
        use_cpu_kernels(models.node(), threads=1, quantisation=wanted)

    told = [record.getMessage() for record in caplog.records if "perplexity" in record.getMessage()]
    assert [one.partition(": perplexity")[0] for one in told] == [
        "llm: weights of int8",
        "llm: keys and values of int8",
    ]
