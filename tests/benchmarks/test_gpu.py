"""`python -m benchmarks gpu` without a GPU: it says so; and on a CPU everybody answers, in a tiny shape."""

import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks import __main__ as benchmarks
from benchmarks import gpu
from benchmarks.gpu import NO_GPU, Load, Shape, measure, shapes
from benchmarks.kept import KeptFigures
from benchmarks.report import Figure
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


TINY_LOAD = Load(prompt=8, answer=4, rounds=1)


def measured(goals: dict[int, float], **changes: Any) -> list[Figure]:
    shape = Shape(name="tiny", model=Qwen3ForCausalLM, config=TINY, goals=goals)
    return list(measure(shape, CPU, 1e9, TINY_LOAD, compiles=False, **changes))


@pytest.mark.slow
def test_everybody_is_measured_ours_first() -> None:
    figures = measured({1: 1.0, 2: 0.7})

    assert [(figure.name, figure.unit) for figure in figures[:12]] == [
        ("tiny, 1 at a time: ours", "tok/s"),
        ("tiny, 1 at a time: decodes alone, of the limit", "%"),
        ("tiny, 1 at a time: ours, each step read first", "tok/s"),
        ("tiny, 1 at a time: ours / ours, each step read first", "x"),
        ("tiny, 1 at a time: ours, without CUDA graphs", "tok/s"),
        ("tiny, 1 at a time: ours / ours, without CUDA graphs", "x"),
        ("tiny, 1 at a time: ours, FlashInfer attention", "tok/s"),
        ("tiny, 1 at a time: transformers continuous", "tok/s"),
        ("tiny, 1 at a time: ours / transformers continuous", "x"),
        ("tiny, 1 at a time: static cache, compiled", "tok/s"),
        ("tiny, 1 at a time: ours / static cache, compiled", "x"),
        ("tiny, 1 at a time: ours, again", "tok/s"),
    ]
    assert len(figures) == 24
    assert "failed: ConfigError: model_kwargs.attention: flashinfer" in figures[6].note
    assert all(figure.value > 0 for figure in figures if "FlashInfer" not in figure.name)
    assert "goal 1 tok/s reached" in figures[1].note
    assert "goal 70%" in figures[13].note


@pytest.mark.slow
def test_a_contender_that_fails_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**fields: object) -> None:
        raise TypeError("an unexpected argument")

    monkeypatch.setattr("benchmarks.gpu.ContinuousBatchingConfig", fail)
    monkeypatch.setattr("benchmarks.gpu.dataclasses.fields", lambda _: [])

    figures = {figure.name.removeprefix("tiny, 1 at a time: "): figure for figure in measured({1: 1.0})}

    assert figures["transformers continuous"].note == "failed: TypeError: an unexpected argument"
    assert math.isnan(figures["transformers continuous"].value)
    assert "ours / transformers continuous" not in figures
    assert figures["ours / static cache, compiled"].value > 0


def test_only_the_named_are_measured_and_none_begins_too_late() -> None:
    only = measured({1: 1.0}, only=["ours"])
    late = measured({1: 1.0}, only=["ours"], until_s=0.0)

    assert [figure.name for figure in only] == [
        "tiny, 1 at a time: ours",
        "tiny, 1 at a time: decodes alone, of the limit",
    ]
    assert [figure.note for figure in late] == ["left out: the time is used up"]


@pytest.mark.slow
def test_a_run_goes_on_where_the_one_before_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["ours", "ours, without CUDA graphs"]
    before = measured({1: 1.0}, only=["ours"], kept=KeptFigures(tmp_path / "kept.jsonl"))
    made: list[str] = []
    contenders = gpu._contenders

    def counted(*args: Any, **options: Any) -> Any:
        made.append("contenders")
        return contenders(*args, **options)

    monkeypatch.setattr(gpu, "_contenders", counted)

    kept = KeptFigures(tmp_path / "kept.jsonl")
    after = {figure.name: figure for figure in measured({1: 1.0}, only=names, kept=kept)}
    again = measured({1: 1.0}, only=names, kept=KeptFigures(tmp_path / "kept.jsonl"))

    assert [after[figure.name].value for figure in before] == [figure.value for figure in before]
    assert after["tiny, 1 at a time: ours"].note.endswith("; measured before")
    mine, other = (after[f"tiny, 1 at a time: {name}"].value for name in names)
    assert after["tiny, 1 at a time: ours / ours, without CUDA graphs"].value == mine / other
    assert [figure.value for figure in again] == [figure.value for figure in after.values()]
    assert made == ["contenders"], "nothing is loaded if all is known"


@pytest.mark.parametrize("field", ["page_size", "block_size"])
def test_a_page_has_the_name_that_the_installed_transformers_gives_it(
    monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    given: dict[str, int] = {}

    class Config:
        def __init__(self, **fields: int) -> None:
            given.update(fields)
            raise NotImplementedError

    monkeypatch.setattr("benchmarks.gpu.ContinuousBatchingConfig", Config)
    monkeypatch.setattr("benchmarks.gpu.dataclasses.fields", lambda _: [SimpleNamespace(name=field)])

    measured({1: 1.0}, only=["transformers continuous"])

    assert given[field] == 256


@pytest.mark.slow
def test_where_flashinfer_attends_it_is_measured_beside_our_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer, "_MIN_WORKSPACE_BYTES", 1 << 10)
    monkeypatch.setattr(flashinfer, "make_kernel", lambda node: FlashInfer(flashinfer_reference, node.device))

    figures = measured({1: 1.0}, only=["ours", "ours, FlashInfer attention"])

    assert [figure.name.removeprefix("tiny, 1 at a time: ") for figure in figures if figure.value > 0] == [
        "ours",
        "decodes alone, of the limit",
        "ours, FlashInfer attention",
        "ours / ours, FlashInfer attention",
        "ours, again",
    ]


def test_the_shapes_are_those_of_the_published_models() -> None:
    weights = {}
    for shape in shapes():
        with torch.device("meta"):
            weights[shape.name] = sum(p.numel() for p in shape.model(shape.config).parameters())

    assert weights == {"Qwen3-8B": 8_190_735_360, "Orpheus-3B": 3_300_867_072}
