"""`python -m benchmarks gpu-first` without a GPU: it says so; on a CPU its checks run, in a tiny shape."""

import copy
import sys

import pytest
import torch
from transformers import Qwen3ForCausalLM

from benchmarks import __main__ as benchmarks
from benchmarks import gpu, gpu_first
from tests.benchmarks.test_gpu import TINY

CPU = torch.device("cpu")


def test_without_a_gpu_it_says_so_and_ends_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["benchmarks", "gpu-first", "engines"])

    with pytest.raises(SystemExit) as end:
        benchmarks.main()

    assert end.value.code == gpu.NO_GPU == 2
    assert "nothing was checked" in capsys.readouterr().err


def test_an_unknown_check_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_first.main(["engine"])

    assert "unknown ['engine']: expected some of environment, attention, engines" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.processes
def test_results_and_speeds_of_an_engine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = copy.deepcopy(TINY)
    config.vocab_size, config.max_position_embeddings = 5000, 2048
    tiny = gpu.Shape(name="tiny", model=Qwen3ForCausalLM, config=config, goals={})
    monkeypatch.setattr(gpu, "shapes", lambda: [tiny, tiny])

    assert gpu_first.run(["environment", "engines", "steps"], CPU) == []

    said = capsys.readouterr().out
    assert "of 12 answers 12 alike read first, 12 without CUDA graphs" in said
    assert said.count("tiny: decode, 1 rows, Orpheus") == 2
    assert "tiny: first token of 512" in said


def test_a_check_that_fails_stops_no_other_and_no_more_begin_after_the_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(_: torch.device) -> None:
        raise ValueError("expected this")

    monkeypatch.setattr(gpu_first, "CHECKS", {"bad": fails, "good": lambda _: None})

    assert gpu_first.run(["bad", "good"], CPU) == ["bad"]
    assert "ValueError: expected this" in capsys.readouterr().out
    assert gpu_first.run(["good"], CPU, budget_s=-1.0) == ["good"]
    assert "== good: left out, the time is used up" in capsys.readouterr().out
