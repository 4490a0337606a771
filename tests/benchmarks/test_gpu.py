"""`python -m benchmarks gpu` without a GPU: it says so; and on a CPU everybody answers, in a tiny shape."""

import sys

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks import __main__ as benchmarks
from benchmarks.gpu import NO_GPU, Load, Shape, measure, read_bytes_per_s, shapes
from tests.workers.kv_engine import flashinfer_reference
from workers.kv_engine.attention import flashinfer
from workers.kv_engine.attention.flashinfer import FlashInfer

CPU = torch.device("cpu")
TINY = Qwen3Config(
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=200,
    max_position_embeddings=256,
    tie_word_embeddings=False,
)


def test_without_a_gpu_it_says_so_and_ends_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["benchmarks", "gpu"])

    with pytest.raises(SystemExit) as end:
        benchmarks.main()

    assert end.value.code == NO_GPU == 2
    assert "nothing was measured" in capsys.readouterr().err


@pytest.mark.slow
def test_everybody_is_measured_in_turns_and_ratios_come_first() -> None:
    shape = Shape(name="tiny", model=Qwen3ForCausalLM, config=TINY, goals={1: 1.0, 2: 0.7})

    figures = measure(
        shape, CPU, read_bytes_per_s(CPU, 1 << 20), Load(prompt=8, answer=4, rounds=1), compiles=False
    )

    assert [(figure.name, figure.unit) for figure in figures[:10]] == [
        ("tiny, 1 at a time: ours / transformers continuous", "x"),
        ("tiny, 1 at a time: ours / static cache, compiled", "x"),
        ("tiny, 1 at a time: ours / ours, each step read first", "x"),
        ("tiny, 1 at a time: ours / ours, without CUDA graphs", "x"),
        ("tiny, 1 at a time: ours", "tok/s"),
        ("tiny, 1 at a time: ours, each step read first", "tok/s"),
        ("tiny, 1 at a time: ours, without CUDA graphs", "tok/s"),
        ("tiny, 1 at a time: transformers continuous", "tok/s"),
        ("tiny, 1 at a time: static cache, compiled", "tok/s"),
        ("tiny, 1 at a time: decodes alone, of the limit", "%"),
    ]
    assert len(figures) == 20
    assert all(figure.value > 0 for figure in figures)
    assert "goal 1 tok/s reached" in figures[9].note
    assert "goal 70%" in figures[19].note


@pytest.mark.slow
def test_where_flashinfer_attends_it_is_measured_beside_our_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(name="tiny", model=Qwen3ForCausalLM, config=TINY, goals={1: 1.0})
    monkeypatch.setattr(flashinfer, "_MIN_WORKSPACE_BYTES", 1 << 10)
    monkeypatch.setattr(flashinfer, "make_kernel", lambda node: FlashInfer(flashinfer_reference, node.device))

    figures = measure(shape, CPU, 1e9, Load(prompt=8, answer=4, rounds=1), compiles=False)

    names = [figure.name.removeprefix("tiny, 1 at a time: ") for figure in figures if figure.value > 0]
    assert [(names.index(name), name) for name in names if "FlashInfer" in name] == [
        (4, "ours / ours, FlashInfer attention"),
        (10, "ours, FlashInfer attention"),
    ]


def test_the_shapes_are_those_of_the_published_models() -> None:
    weights = {}
    for shape in shapes():
        with torch.device("meta"):
            weights[shape.name] = sum(p.numel() for p in shape.model(shape.config).parameters())

    assert weights == {"Qwen3-8B": 8_190_735_360, "Orpheus-3B": 3_300_867_072}
